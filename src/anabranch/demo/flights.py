"""The demo's query: a common stateful query that follows every aircraft, departure by departure.

Each figure depends on the order of an aircraft's departures, so a record that overtakes another changes the result:
`longest`, the longest run of departures that were more than 15 minutes late, and `jump`, the largest increase in delay
from one departure to the next. A cancelled flight is not a departure.

The source keeps the order of each key across micro-batches; within a micro-batch the query sorts by `sequence`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.state import GroupState

LATE_MINUTES = 15
BUCKETS = 16
"""Aircraft share states, so that a micro-batch calls Python a few times instead of once for each of 4,000 aircraft."""
STATE_SCHEMA = "fleet string"
OUTPUT_SCHEMA = "tailnum string, legs long, longest long, jump double"


class Aircraft(NamedTuple):
    """The departures of an aircraft so far."""

    legs: int = 0
    run: int = 0
    """Departures in the current run of late ones."""
    longest: int = 0
    last: float = 0.0
    """Delay of the last departure in minutes; undefined before the first."""
    jump: float = 0.0
    """0 if the delay never increased."""

    def depart(self, delay: float) -> Aircraft:
        """Add one departure, `delay` minutes late."""
        run = self.run + 1 if delay > LATE_MINUTES else 0
        jump = max(self.jump, delay - self.last) if self.legs else 0.0
        return Aircraft(self.legs + 1, run, max(self.longest, run), delay, jump)


NEVER_FLOWN = Aircraft()


class Result(NamedTuple):
    """The compared figures of an aircraft."""

    legs: int
    longest: int
    jump: float


def single_pass(departures: Iterable[tuple[str | None, float | None]]) -> dict[str, Result]:
    """Compute every aircraft's result in one plain pass over (tailnum, delay) in order of scheduled departure."""
    fleet: dict[str, Aircraft] = {}
    for tailnum, delay in departures:
        if tailnum is not None and delay is not None:
            fleet[tailnum] = fleet.get(tailnum, NEVER_FLOWN).depart(delay)
    return {tailnum: Result(seen.legs, seen.longest, seen.jump) for tailnum, seen in fleet.items()}


def follow(key: tuple[int], chunks: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Add the departures of one bucket's aircraft in a micro-batch, in the order of their `sequence`."""
    import pandas as pd

    fleet = {tail: Aircraft(*seen) for tail, seen in json.loads(state.get[0]).items()} if state.exists else {}
    rows = pd.concat(list(chunks)).sort_values("sequence")
    changed = set(rows["tailnum"])
    for tailnum, delay in zip(rows["tailnum"].tolist(), rows["dep_delay"].tolist(), strict=True):
        fleet[tailnum] = fleet.get(tailnum, NEVER_FLOWN).depart(delay)
    state.update((json.dumps(fleet),))
    results = [(tailnum, fleet[tailnum].legs, fleet[tailnum].longest, fleet[tailnum].jump) for tailnum in changed]
    yield pd.DataFrame(results, columns=["tailnum", "legs", "longest", "jump"])


def start(
    spark: SparkSession,
    options: Mapping[str, str],
    checkpoint: str,
    update: Callable[[int, int, dict[str, Result]], Any],
) -> StreamingQuery:
    """Start the query on a topic of flights; `update` gets id, row count and new results of each micro-batch."""
    from pyspark.sql import functions as F  # noqa: N812

    from anabranch.spark import register

    register(spark)
    flights = spark.readStream.format("anabranch").options(**options).load()
    departures = (
        flights.where("key is not null")
        .select(
            F.col("key").cast("string").alias("tailnum"),
            F.get_json_object(F.col("value").cast("string"), "$.dep_delay").cast("double").alias("dep_delay"),
            "sequence",
        )
        .where("dep_delay is not null")
    )
    buckets = departures.withColumn("bucket", F.pmod(F.xxhash64("tailnum"), F.lit(BUCKETS))).groupBy("bucket")
    results = buckets.applyInPandasWithState(follow, OUTPUT_SCHEMA, STATE_SCHEMA, "update", "NoTimeout")

    def take(batch: DataFrame, batch_id: int) -> None:
        rows = batch.collect()
        update(batch_id, len(rows), {row.tailnum: Result(row.legs, row.longest, row.jump) for row in rows})

    return results.writeStream.foreachBatch(take).outputMode("update").option("checkpointLocation", checkpoint).start()
