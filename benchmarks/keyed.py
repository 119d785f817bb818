"""State per key in Spark: `anabranch.spark.keyed` against the usual `applyInPandasWithState`, which loops over rows.

Both read the same topic with the same source in the same session, in three micro-batches, and find for each key the
number of rows and the largest increase from one row to the next, which depends on the order. The first micro-batch, in
which Spark compiles the query and starts its workers, is not measured. Every round checks the results of all keys.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from anabranch.client.sync import Admin, Producer
from anabranch.spark.keyed import KeyState, keyed
from benchmarks.harness import Bar, Result, Round, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from benchmarks.spark import session

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql.streaming.state import GroupState

OUTPUT = "key string, count long, jump double"
STATE = "rows long, last double, jump double"
TASKS = 2
BATCHES = 3


class Level(NamedTuple):
    """What is known of a key."""

    rows: int
    last: float
    jump: float
    """0 if the level has never increased."""


def by_column(key: str, rows: pa.RecordBatch, state: KeyState[Level]) -> tuple[Any, ...]:
    """Follow a key with one pass of NumPy over its rows."""
    levels = rows.column("level").to_numpy()
    before = state.value or Level(0, float(levels[0]), 0.0)
    jump = max(before.jump, float(np.diff(levels, prepend=before.last).max()))
    state.update(Level(before.rows + len(levels), float(levels[-1]), jump))
    return key, before.rows + len(levels), jump


def usual(key: tuple[str], frames: Iterator[Any], state: GroupState) -> Iterator[pd.DataFrame]:
    """Follow a key row by row, as is usual."""
    import pandas as pd

    known = Level(*state.get) if state.exists else None
    for frame in frames:
        for row in frame.itertuples(index=False):
            jump = 0.0 if known is None else max(known.jump, row.level - known.last)
            known = Level(1 if known is None else known.rows + 1, row.level, jump)
    assert known is not None
    state.update(tuple(known))
    yield pd.DataFrame([(key[0], known.rows, known.jump)], columns=["key", "count", "jump"])


def by_key(df: DataFrame) -> DataFrame:
    """Group by key, as is usual."""
    return df.groupBy("key").applyInPandasWithState(usual, OUTPUT, STATE, "append", "NoTimeout")


def many_keys(scale: Scale) -> list[Result]:
    """Rows a second through a function with state per key, ten rows of each key in a micro-batch, against a loop."""
    return _state_per_key("keyed.many_keys", *scale.choose((10_000, 30), (50, 21)), scale)


def few_keys(scale: Scale) -> list[Result]:
    """Rows a second through a function with state per key, 500 rows of each key in a micro-batch, against a loop."""
    return _state_per_key("keyed.few_keys", *scale.choose((2_000, 1_500), (10, 60)), scale)


def _state_per_key(name: str, keys: int, per_key: int, scale: Scale) -> list[Result]:
    levels = np.random.default_rng(7).random((per_key, keys))
    jumps = np.maximum(np.diff(levels, axis=0).max(axis=0), 0.0)
    with Anabranch(settings={"durability": "os"}) as broker, session() as spark:
        with Admin(bootstrap_servers=broker.address) as admin, Producer(bootstrap_servers=broker.address) as producer:
            admin.create_topics("levels", partitions=TASKS)
            names = pa.array([f"key-{number:06d}" for number in range(keys)])
            for row in levels:
                text = pa.array([f"{level:.17g}" for level in row])
                producer.send_arrow("levels", pa.table({"key": names, "value": text}))
        options = {"kafka.bootstrap.servers": broker.address, "subscribe": "levels", "startingOffsets": "earliest"}
        limit = str(keys * per_key // BATCHES)
        rows = spark.readStream.format("anabranch").options(**options, maxOffsetsPerTrigger=limit).load()
        parsed = rows.selectExpr(
            "cast(key as string) key", "topic", "partition", "sequence", "cast(cast(value as string) as double) level"
        )
        expected = {f"key-{number:06d}": (per_key, float(jump)) for number, jump in enumerate(jumps)}
        return compare(
            name,
            what=f"{keys} keys with {per_key} records each, {TASKS} partitions, {BATCHES} micro-batches, local[2]: "
            "number of rows and largest increase of each key; by the query's progress after the first micro-batch",
            sides={
                "keyed": _followed(parsed.transform(keyed(by_column, state=Level, output=OUTPUT)), expected),
                "applyInPandasWithState, loop": _followed(by_key(parsed), expected),
            },
            bars=[Bar("rows_per_s", "rows/s", "more", 3.0)],
            scale=scale,
        )


def _followed(df: DataFrame, expected: Mapping[str, tuple[int, float]]) -> Round:
    def once() -> Mapping[str, float]:
        found: dict[str, tuple[int, float]] = {}

        def take(batch: DataFrame, _: int) -> None:
            found.update({row.key: (row["count"], row.jump) for row in batch.collect()})

        with tempfile.TemporaryDirectory() as checkpoint:
            writer = df.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
        assert found == expected
        measured = [each for each in query.recentProgress if each.batchId and each.numInputRows]
        assert measured
        took_ms = sum(each.durationMs["triggerExecution"] for each in measured)
        return {"rows_per_s": 1000 * sum(each.numInputRows for each in measured) / took_ms}

    return once


BENCHMARKS: dict[str, Callable[[Scale], list[Result]]] = {"many_keys": many_keys, "few_keys": few_keys}
