"""The definitions of the pipeline: flights to the state of each aircraft, to a topic and to a table."""

from __future__ import annotations

import pyarrow as pa
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from anabranch.demo.flights import NEVER_FLOWN, Aircraft
from anabranch.spark import register
from anabranch.spark.keyed import KeyState, keyed

spark = SparkSession.active()
register(spark)
BROKER = {"kafka.bootstrap.servers": spark.conf.get("aircraft.broker")}
FIGURES = "legs long, longest long, jump double"


def follow(tailnum: str, rows: pa.RecordBatch, state: KeyState[Aircraft]) -> tuple[object, ...]:
    """Add an aircraft's departures, in order."""
    aircraft = state.value or NEVER_FLOWN
    for delay in rows.column("dep_delay").to_pylist():
        aircraft = aircraft.depart(delay)
    state.update(aircraft)
    return tailnum, aircraft.legs, aircraft.longest, aircraft.jump


def followed() -> DataFrame:
    """Follow every aircraft: a row for each with new departures, micro-batch by micro-batch."""
    reader = spark.readStream.format("anabranch").options(**BROKER)
    flights = reader.options(subscribe="flights", startingOffsets="earliest").load()
    delay = F.get_json_object(F.col("value").cast("string"), "$.dep_delay").cast("double")
    departures = flights.where("key is not null").select(
        F.col("key").cast("string").alias("key"), "topic", "partition", "sequence", delay.alias("dep_delay")
    )
    follows = keyed(follow, state=Aircraft, output=f"tailnum string, {FIGURES}", buckets=16)
    return departures.where("dep_delay is not null").transform(follows)


FOLLOWED = followed()
"""`keyed` looks at the schema of its rows, which Spark does not allow in the functions of a pipeline."""


@dp.table
def aircraft() -> DataFrame:
    """Keep all rows."""
    return FOLLOWED


dp.create_sink("aircraft_topic", "anabranch", {**BROKER, "topic": "aircraft"})


@dp.append_flow(target="aircraft_topic")
def aircraft_records() -> DataFrame:
    """Write each row to the topic of aircraft, exactly once."""
    rows = spark.readStream.table("aircraft")
    return rows.select(F.col("tailnum").alias("key"), F.to_json(F.struct("legs", "longest", "jump")).alias("value"))


@dp.materialized_view
def fleet() -> DataFrame:
    """Keep the last row of each aircraft."""
    rows = spark.read.table("aircraft")
    return rows.groupBy("tailnum").agg(F.max_by(F.struct("legs", "longest", "jump"), "legs").alias("at"))
