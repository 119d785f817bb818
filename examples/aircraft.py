"""Flights to aircraft to Parquet, exactly once, in Spark: `python examples/aircraft.py`.

The flights of a year, with the aircraft as their key, go into a topic that is resized as they come. One query follows
every aircraft with `keyed` and writes what it knows to a second topic, each micro-batch as a whole; another query reads
that topic and writes Parquet. The longest run of late departures and the largest increase in delay depend on the order
of an aircraft's flights. In the end the last row of each aircraft must be what one pass over the file finds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery
from stage import BLUE, GREEN, Stage, chart, main

from anabranch.client.sync import Admin, Producer
from anabranch.demo.data import expected_results, load_flights
from anabranch.demo.flights import NEVER_FLOWN, Aircraft, Result
from anabranch.spark.keyed import KeyState, keyed

FLIGHTS, AIRCRAFT = "flights", "aircraft"
RESIZES = {2: 6, 4: 3}
"""Partitions from a part of the flights on; there are 2 before."""
PARTS = 6
FIGURES = "legs long, longest long, jump double"


def follow(tailnum: str, rows: pa.RecordBatch, state: KeyState[Aircraft]) -> tuple[object, ...]:
    """Add an aircraft's departures, in order."""
    aircraft = state.value or NEVER_FLOWN
    for delay in rows.column("dep_delay").to_pylist():
        aircraft = aircraft.depart(delay)
    state.update(aircraft)
    return tailnum, aircraft.legs, aircraft.longest, aircraft.jump


def followed(flights: DataFrame) -> DataFrame:
    """Return what is known of each aircraft with new departures, as records."""
    delay = F.get_json_object(F.col("value").cast("string"), "$.dep_delay").cast("double")
    departures = flights.where("key is not null").select(
        F.col("key").cast("string").alias("key"), "topic", "partition", "sequence", delay.alias("dep_delay")
    )
    known = departures.where("dep_delay is not null").transform(
        keyed(follow, state=Aircraft, output=f"key string, {FIGURES}", buckets=16)
    )
    return known.select("key", F.to_json(F.struct("legs", "longest", "jump")).alias("value"))


def start_following(stage: Stage) -> StreamingQuery:
    """Start the query from the topic of flights to the topic of aircraft."""
    writer = followed(stage.stream(FLIGHTS)).writeStream.format("anabranch").options(**stage.options, topic=AIRCRAFT)
    return writer.option("checkpointLocation", stage.path("following")).start()


def start_storing(stage: Stage, parquet: str) -> StreamingQuery:
    """Start the query from the topic of aircraft to Parquet."""
    figures = F.from_json(F.col("value").cast("string"), FIGURES)
    rows = stage.stream(AIRCRAFT).select(F.col("key").cast("string").alias("tailnum"), "sequence", figures.alias("at"))
    writer = rows.select("tailnum", "sequence", "at.*").writeStream.format("parquet").option("path", parquet)
    return writer.option("checkpointLocation", stage.path("storing")).trigger(availableNow=True).start()


def run(stage: Stage, quick: bool, picture: Path) -> bool:
    """Let all flights through; return whether every aircraft is right, and was written once for each micro-batch."""
    flights = load_flights(6_000 if quick else None)
    part = -(-flights.num_rows // PARTS)
    with Admin(stage.address) as admin, Producer(stage.address) as producer:
        for topic in (FLIGHTS, AIRCRAFT):
            admin.create_topics(topic, partitions=2)
        query = start_following(stage)
        for number in range(PARTS):
            if number in RESIZES:
                admin.resize(FLIGHTS, RESIZES[number])
            producer.send_arrow(FLIGHTS, flights.slice(number * part, part).select(["key", "value"]))
            producer.flush()
            if not quick:
                query.processAllAvailable()
        query.processAllAvailable()
        query.stop()
    parquet = stage.path("parquet")
    start_storing(stage, parquet).awaitTermination()
    stored = stage.spark.read.parquet(parquet)
    last = stored.groupBy("tailnum").agg(F.max_by(F.struct("legs", "longest", "jump"), "sequence").alias("at"))
    found = {row.tailnum: Result(*row.at) for row in last.collect()}
    repeated = stored.count() - stored.select("tailnum", "legs").distinct().count()
    expected = expected_results(flights)
    print(
        f"{flights.num_rows} flights, {len(found)} aircraft, {stored.count()} rows as Parquet, {repeated} of them twice"
    )
    draw(found, flights.num_rows, picture)
    return found == expected and repeated == 0


def draw(found: dict[str, Result], flights: int, picture: Path) -> None:
    """Draw how late aircraft are how often in a row, and how much a delay grows from one flight to the next."""
    figure, (left, right) = chart(2, f"{len(found):,} aircraft on {flights:,} flights from New York, 2013")
    runs = [each.longest for each in found.values()]
    left.hist(runs, bins=range(max(runs) + 2), color=BLUE, rwidth=0.9, align="left")
    left.set(title="Longest run of late departures", xlabel="departures more than 15 minutes late", ylabel="aircraft")
    right.scatter(
        [each.legs for each in found.values()], [each.jump for each in found.values()], s=7, c=GREEN, alpha=0.5
    )
    right.set(title="Largest increase from one departure to the next", xlabel="departures", ylabel="minutes")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main("aircraft", run, (__doc__ or "").partition(":")[0], sys.argv[1:]))
