"""What runs on executors: fetch the offsets of a task, decode them, yield Arrow record batches in Spark's schema.

A fetch is always on its way while what came before is decoded and handed to Spark. Nothing here works record by record:
bytes become columns in the kernels of `records`, and the columns that say the same in every row are slices of one
that was built before. One connection pool per worker process serves all the tasks that Spark gives it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import uvloop

from anabranch.base.errors import AnabranchError, ApiError, DecodeError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.base.limits import SEQUENCE_OFFSET_BITS
from anabranch.client.cluster.metadata import Cluster, TopicInfo
from anabranch.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.memory import as_column, as_numbers
from anabranch.records.batch import HEADER_SIZE, parse_header
from anabranch.spark.options import Options
from anabranch.spark.plan import WHOLE, DataLossError, Loss, Read, Task
from anabranch.spark.snapshot import lane_settings

ARROW_TYPES: dict[str, pa.DataType] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestampType": pa.int32(),
    "sequence": pa.int64(),
    "headers": pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
}
"""The columns of the source as Spark wants them in Arrow."""
DECODED_NAMES = {"timestampType": "timestamp_type", "sequence": "offset"}
"""Where a column comes from another one of the kernels' than that of its name."""

FETCH_SIZE_MAX = 8 * 1024 * 1024
FETCH_SIZE_MIN = 64 * 1024
RECORD_SIZE_GUESS = 1024
DECODED_SIZE_MAX = 32 * 1024 * 1024
"""Bytes of records after which a record batch is handed over."""
FETCH_VERSION_MAX = 12
"""The last version that names topics, so that their ids need not be known."""
RETRY_INTERVAL_S = 0.1

_LENGTH_AT, _LENGTH_END = 8, 12


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """What a task needs to know beside what it reads."""

    options: Options
    columns: tuple[str, ...]
    """In the order of the schema."""


def read_task(task: Task, settings: ReadSettings) -> Iterator[pa.RecordBatch]:
    """Yield a task's records; every key of its range in order, in as many batches as are of handy size."""
    make = _Columns(settings.columns)
    options = settings.options
    keys = None if task.key_range == WHOLE else task.key_range
    check_crc = bool(options.client.get("kafka.check.crcs", True))
    for read, start, data in _fetched(task.reads, _pool(options)):
        complete = False
        while not complete:
            try:
                records, start, complete = decode(
                    data,
                    columns=make.decoded,
                    start_offset=start,
                    end_offset=read.end,
                    key_range=keys,
                    check_crc=check_crc,
                    decoded_size_max=DECODED_SIZE_MAX,
                )
            except DecodeError as error:
                raise DecodeError(f"{TopicPartition(read.topic, read.partition)}: {error}") from error
            if records.num_rows:
                yield make.batch(records, read)


def _fetched(reads: Sequence[Read], pool: _Pool) -> Iterator[tuple[Read, int, memoryview]]:
    """Yield what is fetched of `reads`, with the offset to decode from; the next fetch is sent before."""
    steps = iter(reads)
    read = next(steps, None)
    if read is None:
        return
    size_per_offset: float = RECORD_SIZE_GUESS
    offset = read.start
    pending: Future[_Found] | None = pool.fetch(read, offset, size_per_offset)
    try:
        while pending is not None:
            found = pending.result()
            pending = None
            current, start = read, max(offset, found.offset)
            offset = max(start, found.next_offset)
            if offset > start:
                size_per_offset = max(1.0, len(found.data) / (offset - start))
            if offset >= current.end:
                upcoming = next(steps, None)
                if upcoming is not None:
                    read, offset = upcoming, upcoming.start
                    pending = pool.fetch(read, offset, size_per_offset)
            else:
                pending = pool.fetch(read, offset, size_per_offset)
            if start < current.end:
                yield current, start, found.data
    finally:
        if pending is not None:
            pending.cancel()


# -- columns -----------------------------------------------------------------------------------------------------------


class _Columns:
    """Turns decoded records into the columns of a schema."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._schema = pa.schema([pa.field(name, ARROW_TYPES[name]) for name in names])
        needed = (DECODED_NAMES.get(name, name) for name in names if name not in ("topic", "partition"))
        self.decoded = tuple(dict.fromkeys(needed)) or ("offset",)

    def batch(self, records: pa.RecordBatch, read: Read) -> pa.RecordBatch:
        """The record batch that Spark is given."""
        return pa.RecordBatch.from_arrays(
            [self._column(name, records, read) for name in self._names], schema=self._schema
        )

    def _column(self, name: str, records: pa.RecordBatch, read: Read) -> pa.Array:
        match name:
            case "topic":
                return _repeated_text(read.topic, _rounded(len(records))).slice(0, len(records))
            case "partition":
                return _repeated_int(read.partition, _rounded(len(records))).slice(0, len(records))
            case "sequence":
                return _sequence(records.column("offset"), read)
            case "timestamp":
                return as_column(as_numbers(records.column("timestamp")) * 1000).view(ARROW_TYPES[name])
            case "timestampType":
                return records.column("timestamp_type").cast(ARROW_TYPES[name])
            case "headers":
                return records.column("headers").cast(ARROW_TYPES[name])
        return records.column(name)


def _rounded(count: int) -> int:
    return 1 << (count - 1).bit_length()


@lru_cache(maxsize=16)
def _repeated_text(text: str, count: int) -> pa.Array:
    data = text.encode()
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(data * count))


@lru_cache(maxsize=64)
def _repeated_int(number: int, count: int) -> pa.Array:
    return as_column(np.full(count, number, np.int32))


def _sequence(offsets: pa.Array, read: Read) -> pa.Array:
    """`layout << 48 | offset`, as `Lineage.sequence` says of one record."""
    if len(read.layouts) == 1:
        (layout,) = read.layouts
        return offsets if layout == 0 else as_column(as_numbers(offsets) | (layout << SEQUENCE_OFFSET_BITS))
    numbers = as_numbers(offsets)
    at = np.searchsorted(np.asarray(read.cuts, np.int64), numbers, side="right")
    return as_column((np.asarray(read.layouts, np.int64) << SEQUENCE_OFFSET_BITS)[at] | numbers)


# -- fetching ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """Whole batches at and after `offset`, perhaps with a piece of one more."""

    offset: int
    data: memoryview
    next_offset: int


class _Pool:
    """Connections of one process, on an event loop in a thread of its own."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loop = uvloop.new_event_loop()
        self._topics: dict[str, TopicInfo] = {}
        threading.Thread(target=self._loop.run_forever, name="anabranch-fetch", daemon=True).start()
        self._cluster = self._submit(self._connect()).result()

    def fetch(self, read: Read, offset: int, size_per_offset: float) -> Future[_Found]:
        """Begin to fetch what `read` has at `offset`; at least one whole batch comes, if there is any."""
        settings = self._options.client
        size_max = int(settings.get("kafka.max.partition.fetch.bytes", FETCH_SIZE_MAX))
        wanted = int((read.end - offset) * size_per_offset * 1.1)
        size = min(size_max, max(FETCH_SIZE_MIN, wanted))
        return self._submit(self._fetch(read, offset, size))

    def _submit(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _connect(self) -> Cluster:
        return Cluster(self._options.servers, lane_settings(self._options))

    async def _fetch(self, read: Read, offset: int, size: int) -> _Found:
        tp = TopicPartition(read.topic, read.partition)
        deadline = time.monotonic() + self._options.poll_timeout_ms / 1000
        while True:
            error: AnabranchError
            try:
                found = await self._ask(read, offset, size)
                if found is not None:
                    return found
                error = ApiError(ErrorCode.OFFSET_NOT_AVAILABLE, f"the broker sends nothing of {tp} at offset {offset}")
            except ApiError as refused:
                if not refused.retriable:
                    raise
                error = refused
            except (AnabranchError, OSError) as failed:
                if isinstance(failed, DecodeError | DataLossError):
                    raise
                error = failed if isinstance(failed, AnabranchError) else AnabranchError(str(failed))
            self._topics.pop(read.topic, None)
            if time.monotonic() > deadline:
                error.add_note(f"Tried for {self._options.poll_timeout_ms} ms (kafkaConsumer.pollTimeoutMs).")
                raise error
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _ask(self, read: Read, offset: int, size: int) -> _Found | None:
        info = self._topics.get(read.topic)
        if info is None or read.partition not in info.partitions:
            info = self._topics[read.topic] = await self._cluster.topic(read.topic)
        partition = info.partitions.get(read.partition)
        if partition is None:
            return self._lost(read, offset, read.end, None, "the partition was removed")
        if partition.leader < 0:
            raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, f"{read.topic}-{read.partition} has no leader")
        connection = await self._cluster.connection(partition.leader)
        options = self._options
        max_wait_ms = int(options.client.get("kafka.fetch.max.wait.ms", 500))
        request = FetchRequest(
            replica_id=-1,
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            max_bytes=int(options.client.get("kafka.fetch.max.bytes", 50 * 1024 * 1024)),
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[
                FetchTopic(
                    topic=read.topic,
                    partitions=[
                        FetchPartition(partition=read.partition, fetch_offset=offset, partition_max_bytes=size)
                    ],
                )
            ],
            forgotten_topics_data=[],
        )
        version = min(connection.version_of(FetchRequest), FETCH_VERSION_MAX)
        timeout_ms = max_wait_ms + int(options.client.get("kafka.request.timeout.ms", 30_000))
        response = await connection.send(request, timeout_ms=timeout_ms, version=version)
        if response.error_code:
            raise ApiError(ErrorCode.of(response.error_code), f"{connection.name} refused a fetch")
        (answer,) = (data for topic in response.responses for data in topic.partitions)
        code = ErrorCode.of(answer.error_code)
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            return self._lost(read, offset, max(offset, answer.log_start_offset), answer.log_start_offset, "it is gone")
        if code is not ErrorCode.NONE:
            raise ApiError(code, f"{connection.name} refused a fetch of {read.topic}-{read.partition}")
        if answer.records is None or len(answer.records) < HEADER_SIZE:
            return None
        next_offset = _next_offset(answer.records)
        return None if next_offset is None else _Found(offset, answer.records, next_offset)

    def _lost(self, read: Read, offset: int, next_offset: int, available: int | None, why: str) -> _Found:
        """Fail the task, or pass over what is not there any more."""
        if self._options.fail_on_data_loss:
            raise DataLossError([Loss(read.topic, read.partition, offset, available, why)])
        if next_offset <= offset:
            next_offset = read.end
        return _Found(offset, memoryview(b""), next_offset)


def _next_offset(data: memoryview) -> int | None:
    """The offset after the last whole batch; None if there is none."""
    position, last, size = 0, -1, len(data)
    while position + HEADER_SIZE <= size:
        length = int.from_bytes(data[position + _LENGTH_AT : position + _LENGTH_END], "big", signed=True)
        if length < HEADER_SIZE - _LENGTH_END:
            raise DecodeError(f"a record batch of {length} bytes is too short for its header")
        if position + _LENGTH_END + length > size:
            break
        last, position = position, position + _LENGTH_END + length
    return None if last < 0 else parse_header(data, last).next_offset


_pools: dict[tuple[Any, ...], _Pool] = {}


def _pool(options: Options) -> _Pool:
    key = (os.getpid(), options.servers, tuple(sorted(options.client.items())), options.fail_on_data_loss)
    pool = _pools.get(key)
    if pool is None:
        pool = _pools[key] = _Pool(options)
    return pool
