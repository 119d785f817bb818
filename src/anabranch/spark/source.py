"""The data source that Spark sees: `spark.read.format("anabranch")` and `spark.readStream.format("anabranch")`.

The driver takes snapshots of the topics, plans (`plan`) and logs the plan; executors fetch and decode (`reader`). A
streaming query's offsets are those of every partition it has begun. New partitions begin at their log start, removed
partitions are dropped; neither fails a query. Unread records that were deleted fail the query, unless
`failOnDataLoss` is false.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.runtime.collector import collector_paused
from anabranch.spark.checkpoint import kafka_offsets_of
from anabranch.spark.options import EARLIEST, LATEST, Bound, OptionError, Options, for_batch, for_stream, parse
from anabranch.spark.plan import (
    DataLossError,
    Loss,
    Offsets,
    Splitting,
    Task,
    TopicOffsets,
    TopicSnapshot,
    begun_of,
    extent,
    is_folded_back,
    keys_within,
    lost_between,
    offsets_from_json,
    offsets_to_json,
    plan_tasks,
    plan_to_json,
    query_positions,
    report,
    with_begun,
)
from anabranch.spark.pushdown import Pushed
from anabranch.spark.reader import ReadSettings, read_task
from anabranch.spark.sink.options import parse as parse_sink
from anabranch.spark.sink.writer import BatchWriter, StreamWriter
from anabranch.spark.snapshot import NO_OFFSETS, SnapshotReader, reads
from anabranch.spark.workers import Sent, set_imports_aside

FORMAT = "anabranch"
OWN, GROUP = "", "group"
"""In the offsets of a query, beside its topics: what is its own, and of that the end of its group's name."""
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"

SPARK_TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "sequence": LongType(),
    "headers": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}

log = logging.getLogger("anabranch.spark")
plans = logging.getLogger("anabranch.spark.plan")


def full_schema(*, headers: bool) -> StructType:
    """Return the schema of the source: that of Spark's Kafka source, and `sequence`."""
    return StructType([StructField(name, kind) for name, kind in SPARK_TYPES.items() if headers or name != "headers"])


class TaskPartition(InputPartition):
    """A task on its way to an executor."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)


class AnabranchDataSource(Sent, DataSource):
    """Reads and writes topics. `register` adds the data source to a session under the name `anabranch`."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the schema of all columns; a query can choose fewer with `.schema("key binary, value binary")`."""
        return full_schema(headers=parse(self.options).headers)

    def reader(self, schema: StructType) -> BatchReader:
        """Return a reader for a batch query."""
        return BatchReader(for_batch(parse(self.options)), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        """Return a reader for a streaming query."""
        return StreamReader(for_stream(parse(self.options)), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return a writer for a batch query."""
        if overwrite:
            raise OptionError('A topic cannot be overwritten: use mode("append").')
        return BatchWriter(parse_sink(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """Return a writer for a streaming query."""
        if overwrite:
            raise OptionError('A topic cannot be overwritten: use outputMode("append").')
        return StreamWriter(parse_sink(self.options), schema)


class FilteringDataSource(AnabranchDataSource):
    """The data source for sessions that push filters down; Spark refuses such a reader in other sessions."""

    def reader(self, schema: StructType) -> BatchReader:
        """Return a reader for a batch query that accepts filters."""
        return FilteringBatchReader(for_batch(parse(self.options)), schema)


class _Reader(Sent):
    """The common part of batch and streaming readers."""

    def __init__(self, options: Options, schema: StructType) -> None:
        set_imports_aside()
        self.options = options
        self.settings = ReadSettings(options, _columns(schema, options))
        self.splitting = Splitting(options.min_partitions, options.records_per_partition_max, options.split_by_key)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the records of one task as Arrow record batches."""
        if isinstance(partition, TaskPartition):
            yield from read_task(partition.value, self.settings)

    def _tasks(
        self,
        snapshots: Mapping[str, TopicSnapshot],
        start: Mapping[str, Mapping[int, int]],
        end: Mapping[str, Mapping[int, int]],
        *,
        whole: bool,
    ) -> list[TaskPartition]:
        with collector_paused():
            tasks = plan_tasks(snapshots, start, end, self.splitting, whole=whole, assigned=self.options.assign)
        path = self.options.plan_log
        if path or plans.isEnabledFor(logging.INFO):
            line = plan_to_json(snapshots, start, end, tasks, by_key=self.splitting.by_key, whole=whole)
            plans.info("%s", line)
            if path:
                _append(path, line)
        keys = self.settings.keys
        return [TaskPartition(task) for task in tasks if keys is None or keys_within(task, keys)]

    def _report(self, losses: Sequence[Loss]) -> None:
        """Raise `DataLossError` for lost records, or log the skipped ones if `failOnDataLoss` is false."""
        losses = [_explained(loss, self.options) for loss in losses]
        if losses and self.options.fail_on_data_loss:
            raise DataLossError(losses)
        for loss in losses:
            log.warning("Records were lost before this query read them: %s", loss)


def _explained(loss: Loss, options: Options) -> Loss:
    """Say of a topic that is no longer read whether that is the option's doing."""
    if loss.partition is not None or reads(options, loss.topic):
        return loss
    option = "subscribePattern" if options.pattern is not None else "subscribe" if options.assign is None else "assign"
    verb = "match" if options.pattern is not None else "name"
    return replace(loss, why=f"the option {option} does not {verb} the topic any more")


def _append(path: str, line: str) -> None:
    """Append a line to a file, after the end of one that a crash has torn."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                line = "\n" + line
        file.write(f"{line}\n".encode())


def _columns(schema: StructType, options: Options) -> tuple[str, ...]:
    """Return the columns of a schema that a user may have written. Raises `OptionError`."""
    for field in schema.fields:
        known = SPARK_TYPES.get(field.name)
        if known is None:
            raise OptionError(f"There is no column '{field.name}'; there are {', '.join(SPARK_TYPES)}.")
        if field.dataType != known:
            wanted = f"{field.name} {known.simpleString()}"
            raise OptionError(f"Column {field.name} is {known.simpleString()}: write '{wanted}' in the schema.")
        if not field.nullable:
            raise OptionError(f"Column {field.name} cannot be declared NOT NULL: a topic promises nothing about it.")
    if not schema.fields:
        raise OptionError("The schema has no column; name at least one.")
    if "headers" in schema.names and not options.headers:
        raise OptionError("Set the option includeHeaders to true to read the column headers.")
    return tuple(schema.names)


# -- batch -------------------------------------------------------------------------------------------------------------


class BatchReader(_Reader, DataSourceReader):
    """Reads all records between two offsets, every key in order within its task."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.pushed = Pushed()

    def partitions(self) -> list[TaskPartition]:
        """Plan the tasks."""
        options = self.options
        reader = SnapshotReader(options)
        try:
            snapshots = reader.read(begins=True)
            _check_assignment(snapshots, options)
            start = reader.bound(snapshots, options.start or Bound(EARLIEST), _name_of("starting", options.start))
            end = reader.bound(snapshots, options.end or Bound(LATEST), _name_of("ending", options.end))
            snapshots = reader.with_high_watermarks(snapshots, start)
            losses: list[Loss] = []
            for topic, snapshot in snapshots.items():
                assigned = None if options.assign is None else options.assign[topic]
                wanted = {p: at for p, at in start[topic].items() if assigned is None or p in assigned}
                found = query_positions(snapshot, TopicOffsets(wanted), assigned)
                losses += found.losses
                first = dict(found.positions)
                last = {partition: min(end[topic].get(partition, 0), snapshot.ends[partition]) for partition in first}
                for range_ in self.pushed.ranges:
                    range_.narrow(lambda at, topic=topic: reader.at_timestamp(topic, at), first, last)  # type: ignore[misc]
                start[topic] = first
                end[topic] = {partition: max(offset, first[partition]) for partition, offset in last.items()}
            self._report(losses)
        finally:
            reader.close()
        return self._tasks(snapshots, start, end, whole=True)


class FilteringBatchReader(BatchReader):
    """Reads only what filters on partition, offset, timestamp and key select."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Accept the filters that leave less to read; return the filters that Spark must still evaluate."""
        left = list(self.pushed.push(filters))
        self.settings = replace(self.settings, keys=self.pushed.keys)
        return left


def _name_of(which: str, bound: Bound | None) -> str:
    if bound is not None and bound.timestamp is not None:
        return f"{which}Timestamp"
    return f"{which}OffsetsByTimestamp" if bound is not None and bound.timestamps else f"{which}Offsets"


def _check_assignment(snapshots: Mapping[str, TopicSnapshot], options: Options) -> None:
    for topic, numbers in (options.assign or {}).items():
        has = snapshots[topic].starts
        absent = sorted(numbers - has.keys())
        if absent:
            raise OptionError(f"assign names partition {absent[0]} of {topic}, which has partitions 0 to {max(has)}.")


def _still_there(offsets: Offsets, snapshots: Mapping[str, TopicSnapshot]) -> Offsets:
    """Return the offsets of the topics that exist, and are not others of these names."""
    return {topic: known for topic, known in offsets.items() if topic in snapshots and known.is_of(snapshots[topic])}


# -- streaming ---------------------------------------------------------------------------------------------------------


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads continuously, in micro-batches; no micro-batch holds two segments of which one must wait for the other."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._snapshot_reader: SnapshotReader | None = None
        self._snapshots: Mapping[str, TopicSnapshot] | None = None
        self._horizon: dict[str, dict[int, int]] | None = None
        self._reached: Offsets = {}
        self._asked_from: Offsets | None = None
        """Where the micro-batch before began; None before the first."""
        self._knows_topics = False
        """Whether the horizon has all topics that the query had when it began."""
        self._initial: dict[str, Any] | None = None
        self._refused: OptionError | None = None
        """Why a new query cannot begin."""
        self._own = {GROUP: uuid4().hex[:12]}
        """What is the query's own, unless its offsets say otherwise."""

    def _read_snapshots(
        self, known: Offsets = NO_OFFSETS, *, begins: bool | None = None
    ) -> Mapping[str, TopicSnapshot]:
        if self._snapshot_reader is None:
            self._snapshot_reader = SnapshotReader(self.options)
        positions = {topic: each.standing for topic, each in known.items()}
        self._snapshots = self._snapshot_reader.with_high_watermarks(
            self._snapshot_reader.read(known, begins=begins), positions
        )
        return self._snapshots

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offsets where a new query begins.

        Spark asks for them again to run a first micro-batch again, which says where it began: what the options say of
        the topics as they are now is of no interest then, and is refused where they are used.
        """
        try:
            self._initial, self._refused = self._to_json(self._first_offsets(), {}), None
        except OptionError as error:
            self._initial, self._refused = self._to_json({}, {}), error
        self._forget_snapshots()
        return self._initial

    def _first_offsets(self) -> Offsets:
        options = self.options
        snapshots = self._read_snapshots(begins=True)
        _check_assignment(snapshots, options)
        assert self._snapshot_reader is not None
        start = self._snapshot_reader.bound(
            snapshots, options.start or Bound(LATEST), _name_of("starting", options.start)
        )
        offsets: dict[str, TopicOffsets] = {}
        for topic, snapshot in snapshots.items():
            assigned = snapshot.starts.keys() if options.assign is None else options.assign[topic]
            chosen = {partition: start[topic][partition] for partition in assigned}
            offsets[topic] = snapshot.noted(chosen)
        return offsets

    def _check_start(self, start: Mapping[str, Any]) -> None:
        """Refuse to begin where the options do not say where. OptionError."""
        if self._refused is not None and start == self._initial:
            raise self._refused

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a micro-batch."""
        limit = self.options.offsets_per_trigger_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the micro-batch that begins at `start`; `start` itself if no record can be read."""
        self._check_start(start)
        known = _from_json(start, self.options)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        snapshots = self._read_snapshots(known)
        self._raise_horizon(snapshots, known)
        self._asked_from = known
        with collector_paused():
            reach = extent(
                snapshots,
                known,
                rows,
                assigned=self.options.assign,
                horizon=self._horizon,
                reads=partial(reads, self.options),
            )
        self._report(reach.losses)
        self._reached = reach.end
        if start == self._initial:  # Spark runs a first micro-batch in any case.
            return self._to_json(with_begun(reach.end, known), start)
        return self._to_json(reach.end, start) if reach.advances else start

    def _to_json(self, offsets: Offsets, before: Mapping[str, Any]) -> dict[str, Any]:
        """Write offsets; a query with a group of its own takes its name from the offsets before."""
        own = {} if self.options.group_id_prefix is None else {OWN: before.get(OWN, self._own)}
        return {**own, **offsets_to_json(offsets)}

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the log ends, the lag behind them, and what the query waits for, as `plan.report` describes."""
        if self._snapshots is None or self._snapshot_reader is None:
            return None
        return report(self._snapshots, self._reached, self._snapshot_reader.high_watermarks(self._snapshots))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Limit the query to the current log ends."""
        self._horizon = {topic: dict(snapshot.ends) for topic, snapshot in self._read_snapshots(begins=False).items()}
        self._forget_snapshots()

    def _raise_horizon(self, snapshots: Mapping[str, TopicSnapshot], known: Offsets) -> None:
        """Read on to the ends of now where unread records were folded back: their copies lie behind those of then.

        Also if that was while the last micro-batch was read: it stands behind them, and has passed over them.
        """
        if self._horizon is None:
            return
        if not self._knows_topics:  # A topic of the query that one broker did not know of when the query began.
            self._knows_topics = True
            for topic in known.keys() & snapshots.keys() - self._horizon.keys():
                self._horizon[topic] = dict(snapshots[topic].ends)
        assigned = self.options.assign
        for topic, horizon in self._horizon.items():
            snapshot = snapshots.get(topic)
            if snapshot is None:
                continue
            read = None if assigned is None else assigned[topic]
            stood = known if self._asked_from is None else self._asked_from
            if any(is_folded_back(snapshot, each.get(topic), horizon, read) for each in (known, stood)):
                horizon.update({p: max(end, snapshot.ends[p]) for p, end in horizon.items() if p in snapshot.ends})
            for partition in horizon.keys() - snapshot.starts.keys():
                del horizon[partition]

    def _forget_snapshots(self) -> None:
        """Have a replay read them again: these were read without the query's offsets, which are not known yet."""
        self._snapshots = None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[TaskPartition]:
        """Plan the tasks of a micro-batch, including one that an earlier run planned and did not finish."""
        finish = _from_json(end, self.options)
        if finish and all(known.begun is None for known in finish.values()):
            self._check_start(start)
        elif not finish and self._snapshots is None:
            self._refused = None  # It has begun, though without a topic: a new query asks for its end before.
        begin = begun_of(_from_json(start, self.options), finish)
        snapshots = self._snapshots
        if snapshots is None:
            snapshots = self._read_snapshots(finish)
            self._asked_from = begin
        begin, there = _still_there(begin, snapshots), _still_there(finish, snapshots)
        self._report(lost_between(snapshots, begin, finish, self.options.assign))
        first = {topic: known.standing for topic, known in begin.items()}
        last = {topic: known.offsets for topic, known in there.items()}
        return self._tasks({topic: snapshots[topic] for topic in there}, first, last, whole=False)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the query's progress to the consumer group, if the options name one, so that tools can show its lag.

        The query itself resumes from its checkpoint, so a failed commit is logged and the query goes on.
        """
        group_id, prefix = self.options.group_id, self.options.group_id_prefix
        if prefix is not None and OWN in end:
            group_id = f"{prefix}-{end[OWN][GROUP]}"
        if group_id is None or self._snapshot_reader is None:
            return
        offsets = {
            TopicPartition(topic, partition): offset
            for topic, known in _from_json(end, self.options).items()
            for partition, offset in known.offsets.items()
        }
        try:
            self._snapshot_reader.commit(group_id, offsets)
        except (AnabranchError, OSError) as error:
            log.warning("The progress of the query was not committed to group %s: %s", group_id, error)

    def stop(self) -> None:
        """End the connections."""
        if self._snapshot_reader is not None:
            self._snapshot_reader.close()
            self._snapshot_reader = None


def _from_json(value: Mapping[str, Any], options: Options) -> dict[str, TopicOffsets]:
    """Parse offsets of the checkpoint. Raises `OptionError` for those of another source."""
    if kafka_offsets_of(value) is not None:
        raise OptionError(
            "The checkpoint is that of a query on Spark's own Kafka source. Take it over with: anabranch "
            f"convert-checkpoint OLD NEW -b {options.servers}, and set checkpointLocation to NEW."
        )
    try:
        return offsets_from_json({topic: known for topic, known in value.items() if topic != OWN})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise OptionError(
            f"The checkpoint holds an offset of another source: {value}. Start the query with a new checkpointLocation."
        ) from None
