"""The shell around Spark: `keyed` builds the plan, `_Operator` runs in Spark's Python workers and decides nothing.

Of Spark's operators with state, `applyInPandasWithState` is the one whose worker runs no Python per row:
`transformWithState` and `transformWithStateInPandas` build a Python object for each row, and ask the JVM for each
state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from anabranch.spark.keyed.bucket import Function, Settings, Step, Timeout, Times, step
from anabranch.spark.keyed.errors import KeyedError
from anabranch.spark.keyed.packing import (
    BUCKET,
    BUCKETS_MAX,
    EVENT_TIME,
    ROWS,
    from_message,
    from_messages,
    pack,
    to_message,
)
from anabranch.spark.keyed.rows import Columns
from anabranch.spark.keyed.schema import Fields, maker, to_arrow
from anabranch.spark.keyed.state import STORED_SCHEMA, BucketState, decode, empty, encode
from anabranch.spark.workers import set_imports_aside

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.state import GroupState

log = logging.getLogger("anabranch.spark.keyed")

BUCKETS = 64
MESSAGES = f"{ROWS} binary"


def keyed(
    function: Function,
    *,
    state: Fields,
    output: Fields,
    key: str = "key",
    sequence: str = "sequence",
    topic: str | None = "topic",
    partition: str | None = "partition",
    timeout: Timeout = Timeout.NONE,
    ttl_ms: int | None = None,
    event_time: str | None = None,
    watermark: str | None = None,
    buckets: int = BUCKETS,
    output_mode: str = "append",
) -> Callable[[DataFrame], DataFrame]:
    """Return a transformation for `DataFrame.transform` that calls a function with each key's new rows, in order.

    `function(key, rows, state)` gets the key as a Python value, its new rows of a micro-batch as one
    `pyarrow.RecordBatch` with all columns of the frame, sorted by topic and sequence, and a `KeyState`. It returns
    rows of the output: a `pyarrow.RecordBatch` or `Table`, one tuple, an iterable of tuples, or None. It must be
    deterministic: Spark calls it again for a micro-batch that failed. In a batch query it is called once for each
    key, with all rows and no state.

    `state` and `output` are a NamedTuple class, a `pyarrow.Schema`, or a schema of Spark. `key` names a column that
    tells the keys of the topic apart: the record's key, or a cast of it. `topic=None` says that all rows are of one
    topic, `partition=None` that producers agree about the partition of each key at any time. `timeout` allows timeouts
    by processing time, or by the event time of the column `event_time` with a `watermark` such as "10 minutes"; late
    rows are dropped. A key without rows and calls for `ttl_ms` is forgotten. The keys share `buckets` states; the
    number stays with the checkpoint. `output_mode` is that of the query: sinks in Python and files take `append` only.

    Raises `KeyedError` for arguments that do not fit each other or the frame.
    """
    if not 1 <= buckets <= BUCKETS_MAX:
        raise KeyedError(f"buckets must be 1 to {BUCKETS_MAX}; it is {buckets}.")
    if ttl_ms is not None and ttl_ms <= 0:
        raise KeyedError(f"ttl_ms must be 1 or more; it is {ttl_ms}.")
    by_event = timeout is Timeout.EVENT_TIME
    if by_event is (event_time is None) or by_event is (watermark is None):
        raise KeyedError("Timeout.EVENT_TIME, event_time and watermark belong together: give all three, or none.")

    def transform(df: DataFrame) -> DataFrame:
        columns = Columns(key, sequence, topic, partition)
        _check(df, columns, event_time)
        value, wanted = to_arrow(state), to_arrow(output)
        settings = Settings(
            columns, to_arrow(df.schema), pa.struct(list(value)), maker(state), wanted, timeout, ttl_ms, event_time
        )
        return _plan(df, _Operator(function, settings, buckets), watermark, output_mode)

    return transform


def _check(df: DataFrame, columns: Columns, event_time: str | None) -> None:
    """Raise `KeyedError` unless the frame has the columns with their types."""
    kinds = dict(df.dtypes)
    wanted = {
        columns.key: None,
        columns.sequence: "bigint",
        columns.topic: "string",
        columns.partition: "int",
        event_time: "timestamp",
    }
    for name, kind in wanted.items():
        if name is None:
            continue
        if name not in kinds:
            raise KeyedError(f"There is no column {name}; the frame has {', '.join(df.columns)}: select it, too.")
        if kind is not None and kinds[name] != kind:
            raise KeyedError(f"The column {name} is {kinds[name]}; it must be {kind}.")


def _plan(df: DataFrame, operator: _Operator, watermark: str | None, output_mode: str) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.pandas.types import from_arrow_schema

    settings = operator.settings
    bucket = F.pmod(F.xxhash64(F.col(settings.columns.key)), F.lit(operator.buckets)).cast("int").alias(f"__{BUCKET}")
    columns = f"{BUCKET} int, {ROWS} binary" + (f", {EVENT_TIME} timestamp" if settings.event_time else "")
    packed = df.select(bucket, *df.columns).mapInArrow(operator.pack, columns)
    if watermark is not None:
        packed = packed.withWatermark(EVENT_TIME, watermark)
    groups = packed.groupBy(BUCKET)
    if df.isStreaming:
        stepped = groups.applyInPandasWithState(
            operator.stream, MESSAGES, STORED_SCHEMA, output_mode, settings.timeout.value
        )
    else:
        stepped = groups.applyInArrow(lambda messages: operator.batch(messages), MESSAGES)
    output = from_arrow_schema(settings.output, prefer_timestamp_ntz=True)
    return stepped.mapInArrow(operator.unpack, output)


@dataclass(frozen=True)
class _Operator:
    """What Spark's workers run."""

    function: Function
    settings: Settings
    buckets: int

    def pack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pack the rows of a task by bucket."""
        yield from pack(batches, self.settings.rows, self.settings.event_time)
        set_imports_aside()

    def unpack(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the messages that buckets returned."""
        for batch in batches:
            for message in batch.column(0).to_pylist():
                yield from_message(message, self.settings.output)
        set_imports_aside()

    def batch(self, table: pa.Table) -> pa.Table:
        """Work on a bucket of a batch query."""
        rows = from_messages(table.column(ROWS).to_pylist(), self.settings.rows)
        done = step(self.function, self.settings, self._empty(), rows, Times(0))
        return pa.table({ROWS: pa.array([to_message(each) for each in done.output], pa.binary())})

    def stream(self, key: Any, frames: Iterable[pd.DataFrame], group: GroupState) -> Iterator[pd.DataFrame]:
        """Work on a bucket in a micro-batch of a streaming query."""
        import pandas as pd

        settings = self.settings
        messages = [message for frame in frames for message in frame[ROWS].tolist()]
        stored = group.getOption
        before = self._empty()
        if stored is not None:
            before = decode(stored, self.buckets, before.keys.type, settings.value)
        times = Times(group.getCurrentProcessingTimeMs())
        if settings.timeout is Timeout.EVENT_TIME and group.getCurrentWatermarkMs() > 0:
            times = Times(times.processing_ms, group.getCurrentWatermarkMs())
        done = step(self.function, settings, before, from_messages(messages, settings.rows), times)
        self._store(group, done, times)
        if done.late:
            log.warning("Dropped %d rows of bucket %d that were behind the watermark.", done.late, key[0])
        if done.repeated:
            log.warning("Skipped %d rows of bucket %d that had been applied before.", done.repeated, key[0])
        set_imports_aside()
        yield pd.DataFrame({ROWS: [to_message(each) for each in done.output]})

    def _store(self, group: GroupState, done: Step, times: Times) -> None:
        if done.state.is_blank:
            if group.exists:
                group.remove()
            return
        group.update(encode(done.state, self.buckets))
        if done.wake_ms is None:
            return
        if self.settings.timeout is Timeout.EVENT_TIME:
            group.setTimeoutTimestamp(done.wake_ms)
        else:
            group.setTimeoutDuration(done.wake_ms - times.processing_ms)

    def _empty(self) -> BucketState:
        return empty(self.settings.rows.field(self.settings.columns.key).type, self.settings.value)
