"""Ranges of offsets of single partitions, fetched and decoded: the input of a query's tasks.

`RangeReader` fetches without sessions or groups, on an event loop in a thread of its own, and always has the next fetch
in flight while the caller decodes the last one. Of a range of keys, or of some keys, it has brokers send nothing else,
where the topic allows that (`accept.range.fetch`); elsewhere the caller drops the rest. `decode_range` turns fetched
batches into Arrow record batches; the consumer's tables use the same function. Positions, gates and layouts are the
caller's responsibility.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import UUID

import uvloop

from anabranch.base.errors import AnabranchError, ApiError, DecodeError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.connection import Connect, Connection, ConnectionSettings
from anabranch.client.cluster.metadata import Cluster, TopicInfo
from anabranch.client.cluster.turns import Turns
from anabranch.client.consumer.asked import wanted_fields
from anabranch.machines.clients.fetching import EARLIEST
from anabranch.machines.partition.sharing import Asked
from anabranch.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from anabranch.records.batch import HEADER_SIZE, parse_header
from anabranch.records.shares import KeyShare

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.records.arrow.decode import Decoded

FETCH_SIZE_MIN = 64 * 1024
FETCH_SIZE_MAX = 15 * 1024 * 1024
"""A fetch costs about a millisecond on both sides; with its frame's head it fits into a slab of 16 MiB."""
RECORD_SIZE_GUESS = 1024
FETCH_VERSION_BY_NAME = 12
"""The last version that names topics."""
FETCH_VERSION_BY_ID = 13
"""The first version that identifies topics by id."""
RETRY_INTERVAL_S = 0.1
GONE_ATTEMPTS = 20
"""How often brokers must say that a range's partition was removed, or that its topic is another one, until it is so.

A broker may have heard of either late: each that is known has to say so. At the end of the time limit of a fetch the
last answer counts.
"""

DENIALS = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
"""How a broker refuses a partition that it was named the leader of, and does not know.

With NOT_LEADER_OR_FOLLOWER it says that it knows the partition, and that another broker leads it.
"""

_LENGTH_AT, _LENGTH_END = 8, 12

T = TypeVar("T")


class OffsetRange(Protocol):
    """Offsets `start` to `end`, `end` exclusive, of one partition of the topic with this name and, unless "", id."""

    @property
    def topic(self) -> str: ...
    @property
    def topic_id(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


R = TypeVar("R", bound=OffsetRange)


class OffsetsGoneError(AnabranchError):
    """Offsets of a range were deleted; `available` is the log start, None if the partition is gone.

    A log that ends before the offset starts at or before it.
    """

    def __init__(
        self, tp: TopicPartition, offset: int, available: int | None, why: str, *, is_of_another_topic: bool = False
    ) -> None:
        super().__init__(f"{tp} cannot be read at offset {offset}: {why}")
        self.is_of_another_topic = is_of_another_topic
        self.has_retired = available is None and not is_of_another_topic
        """Whether the partition has retired: a resize has taken its keys to others, or it was removed then."""
        self.offset = offset
        self.available = available
        self.why = why


@dataclass(frozen=True, slots=True)
class RangeReaderSettings:
    """The fetch settings of ranges, by Kafka's names."""

    fetch_max_bytes: int = 50 * 1024 * 1024
    max_partition_fetch_bytes: int = FETCH_SIZE_MAX
    fetch_max_wait_ms: int = 500
    request_timeout_ms: int = 30_000
    retry_timeout_ms: int = 120_000
    """The time limit for one fetch, including retries."""
    retry_timeout_name: str = "retry timeout"
    """The name of that setting in error messages."""
    read_committed: bool = True
    """Whether to fetch committed records alone, and to learn which ones were aborted."""


@dataclass(frozen=True, slots=True)
class FetchedRange(Generic[R]):
    """Whole batches of `range`, possibly followed by a partial one; records before `start` must be ignored."""

    range: R
    start: int
    data: memoryview
    filtered: bool = False
    """Whether these are the records that were asked for, alone."""
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of aborted transactions; their records must be skipped."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Whole batches at and after `offset`."""

    offset: int
    data: memoryview
    next_offset: int
    filtered: bool = False
    aborted: tuple[tuple[int, int], ...] = ()


class RangeReader:
    """Reads ranges for the threads of one process.

    `on_gone` is called for deleted offsets: if the function returns instead of raising, the reader skips to the next
    readable offset of the range.
    """

    def __init__(
        self,
        bootstrap_servers: str | Sequence[str],
        connections: ConnectionSettings,
        settings: RangeReaderSettings,
        on_gone: Callable[[OffsetRange, OffsetsGoneError], None],
    ) -> None:
        self._settings = settings
        self._on_gone = on_gone
        self._loop = uvloop.new_event_loop()
        self._topics: dict[str, TopicInfo] = {}
        self._whole_only: set[str] = set()
        """Topics that refuse fetches of a part of the records."""
        threading.Thread(target=self._loop.run_forever, name="anabranch-fetch", daemon=True).start()
        self._cluster = self._submit(_cluster(bootstrap_servers, connections)).result()

    def read(self, ranges: Sequence[R], asked: Asked | None = None) -> Iterator[FetchedRange[R]]:
        """Yield the fetched batches of `ranges`, one range after the other; the next fetch is sent beforehand.

        With `asked`, only the records that it describes are wanted.
        """
        steps = iter(ranges)
        current = next(steps, None)
        if current is None:
            return
        size_per_offset: float = RECORD_SIZE_GUESS
        offset = current.start
        pending: Future[_Found] | None = self._begin(current, offset, size_per_offset, asked)
        try:
            while pending is not None:
                found = pending.result()
                pending = None
                fetched, start = current, max(offset, found.offset)
                offset = max(start, found.next_offset)
                if offset > start:
                    size_per_offset = max(1.0, len(found.data) / (offset - start))
                if offset >= fetched.end:
                    upcoming = next(steps, None)
                    if upcoming is not None:
                        current, offset = upcoming, upcoming.start
                        pending = self._begin(current, offset, size_per_offset, asked)
                else:
                    pending = self._begin(current, offset, size_per_offset, asked)
                if start < fetched.end:
                    yield FetchedRange(fetched, start, found.data, found.filtered, found.aborted)
        finally:
            if pending is not None:
                pending.cancel()

    def _begin(self, wanted: OffsetRange, offset: int, size_per_offset: float, asked: Asked | None) -> Future[_Found]:
        """Start to fetch `wanted` from `offset` on; the result holds at least one whole batch, if one exists."""
        expected = int((wanted.end - offset) * size_per_offset * 1.1)
        size = min(self._settings.max_partition_fetch_bytes, max(FETCH_SIZE_MIN, expected))
        return self._submit(self._fetch(wanted, offset, size, asked))

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _fetch(self, wanted: OffsetRange, offset: int, size: int, asked: Asked | None) -> _Found:
        tp = TopicPartition(wanted.topic, wanted.partition)
        deadline = time.monotonic() + self._settings.retry_timeout_ms / 1000
        gone_attempts, turns = 0, Turns()
        while True:
            error: AnabranchError
            info: TopicInfo | None = None
            try:
                info = await self._info(tp, turns)
                found = await self._ask(info, wanted, offset, size, None if tp.topic in self._whole_only else asked)
                if found is not None:
                    return found
                why = f"the broker sends nothing of {tp} at offset {offset}"
                if self._settings.read_committed:
                    why += ", as while a transaction is open there"
                error = ApiError(ErrorCode.OFFSET_NOT_AVAILABLE, why)
            except OffsetsGoneError as gone:
                gone_attempts += 1
                if gone.available is not None and gone.available > gone.offset:
                    gone.has_retired = await self._has_retired(tp, wanted.topic_id)
                is_gone = gone_attempts >= GONE_ATTEMPTS and turns.all_asked(self._cluster.node_ids)
                if gone.available is not None or is_gone:
                    return self._pass_over(wanted, offset, gone)
                error = gone
            except ApiError as refused:
                if refused.code is ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED and tp.topic not in self._whole_only:
                    self._whole_only.add(tp.topic)
                    continue
                if not refused.retriable:
                    raise
                error = refused
            except DecodeError:
                raise
            except (AnabranchError, OSError) as failed:
                error = failed if isinstance(failed, AnabranchError) else AnabranchError(str(failed))
            is_denied = isinstance(error, ApiError) and error.code in DENIALS
            if info is not None and not is_denied and not isinstance(error, OffsetsGoneError):
                gone_attempts = 0  # A broker knows of the partition, and no leader denies that.
            self._topics.pop(wanted.topic, None)
            if time.monotonic() > deadline:
                if isinstance(error, OffsetsGoneError):
                    return self._pass_over(wanted, offset, error)
                settings = self._settings
                error.add_note(f"Tried for {settings.retry_timeout_ms} ms ({settings.retry_timeout_name}).")
                raise error
            await asyncio.sleep(RETRY_INTERVAL_S)

    def _pass_over(self, wanted: OffsetRange, offset: int, gone: OffsetsGoneError) -> _Found:
        """Report offsets that are gone; go on at the next one that is not."""
        self._on_gone(wanted, gone)
        on = wanted.end if gone.available is None or gone.available <= offset else gone.available
        return _Found(offset, memoryview(b""), on)

    async def _has_retired(self, tp: TopicPartition, topic_id: str) -> bool:
        """Whether a partition has retired by now; False where nobody says so."""
        with contextlib.suppress(AnabranchError, OSError):
            info = self._topics[tp.topic] = await self._cluster.topic(tp.topic)
            is_there = topic_id in ("", info.topic_id.hex)
            return is_there and (tp.partition not in info.partitions or info.partitions[tp.partition].retiring)
        return False

    async def _info(self, tp: TopicPartition, turns: Turns) -> TopicInfo:
        """Return a topic as it is remembered, or as the broker knows it that has its turn."""
        node_id = turns.next(self._cluster.node_ids)
        info = self._topics.get(tp.topic) if node_id is None else None
        if info is None or tp.partition not in info.partitions:
            try:
                info = self._topics[tp.topic] = await self._cluster.topic(tp.topic, node_id=node_id)
            except ConnectionError:
                turns.unreachable()
                raise
        return info

    async def _ask(
        self, info: TopicInfo, wanted: OffsetRange, offset: int, size: int, asked: Asked | None
    ) -> _Found | None:
        tp = TopicPartition(wanted.topic, wanted.partition)
        if wanted.topic_id not in ("", info.topic_id.hex):
            why = "the topic was deleted and created again since"
            raise OffsetsGoneError(tp, offset, None, why, is_of_another_topic=True)
        partition = info.partitions.get(tp.partition)
        if partition is None:
            raise OffsetsGoneError(tp, offset, None, "the partition was removed")
        if partition.leader < 0:
            raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, f"{tp} has no leader")
        connection = await self._cluster.connection(partition.leader)
        settings = self._settings
        by_id = wanted.topic_id and info.topic_id != NO_TOPIC_ID
        version = min(connection.version_of(FetchRequest), FETCH_VERSION_BY_ID if by_id else FETCH_VERSION_BY_NAME)
        timeout_ms = settings.fetch_max_wait_ms + settings.request_timeout_ms
        response = await connection.send(
            _request(tp, info.topic_id, offset, size, settings, asked), timeout_ms=timeout_ms, version=version
        )
        if response.error_code:
            raise ApiError(ErrorCode.of(response.error_code), f"{connection.name} refused a fetch")
        (result,) = (data for topic in response.responses for data in topic.partitions)
        code = ErrorCode.of(result.error_code)
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            log_start = result.log_start_offset
            if log_start < 0:  # A stock Kafka does not say it beside this error.
                log_start = (await self._cluster.offsets({tp: EARLIEST}))[tp].offset
            why = "the records there were deleted" if offset < log_start else "the log ends before"
            raise OffsetsGoneError(tp, offset, log_start, why)
        if code is not ErrorCode.NONE:
            raise ApiError(code, f"{connection.name} refused a fetch of {tp}")
        aborted = tuple((each.producer_id, each.first_offset) for each in result.aborted_transactions or ())
        if result.filtered_to > offset:
            data = result.records or memoryview(b"")
            return _Found(offset, data, result.filtered_to, filtered=True, aborted=aborted)
        if result.records is None or len(result.records) < HEADER_SIZE:
            return None
        next_offset = next_offset_of(result.records)
        return None if next_offset is None else _Found(offset, result.records, next_offset, aborted=aborted)


async def _cluster(bootstrap_servers: str | Sequence[str], connections: ConnectionSettings) -> Cluster:
    return Cluster(bootstrap_servers, replace(connections, connect=_with_slabs(connections.connect)))


def _with_slabs(connect: Connect) -> Connect:
    """Have frames received into slabs: each is gone by the next but one, and fresh memory costs as much as filling."""
    from anabranch.records.arrow.slabs import shelf

    def with_slabs(make: Callable[[], Connection], host: str, port: int, /) -> Awaitable[Connection]:
        def made() -> Connection:
            connection = make()
            connection.frame_memory = lambda size: shelf.take_view(size)[0]
            return connection

        return connect(made, host, port)

    return with_slabs


def _request(
    tp: TopicPartition, topic_id: UUID, offset: int, size: int, settings: RangeReaderSettings, asked: Asked | None
) -> FetchRequest:
    wanted = {} if asked is None else wanted_fields(asked)
    partition = FetchPartition(partition=tp.partition, fetch_offset=offset, partition_max_bytes=size, **wanted)
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=settings.fetch_max_wait_ms,
        # The offsets exist, so nothing need be waited for; but of what is asked for there may be no record.
        min_bytes=1 if asked is None else 0,
        max_bytes=settings.fetch_max_bytes,
        isolation_level=int(settings.read_committed),
        session_id=0,
        session_epoch=-1,
        topics=[FetchTopic(topic=tp.topic, topic_id=topic_id, partitions=[partition])],
        forgotten_topics_data=[],
    )


def next_offset_of(data: memoryview) -> int | None:
    """Return the offset after the last whole batch, None without one. Raises `DecodeError` for a bad length."""
    position, last, size = 0, -1, len(data)
    while position + HEADER_SIZE <= size:
        length = int.from_bytes(data[position + _LENGTH_AT : position + _LENGTH_END], "big", signed=True)
        if length < HEADER_SIZE - _LENGTH_END:
            raise DecodeError(f"a record batch of {length} bytes is too short for its header")
        if position + _LENGTH_END + length > size:
            break
        last, position = position, position + _LENGTH_END + length
    return None if last < 0 else parse_header(data, last).next_offset


def decode_range(
    tp: TopicPartition,
    data: memoryview,
    start: int,
    end: int,
    *,
    columns: Sequence[str],
    share: KeyShare | None = None,
    aborted: Sequence[tuple[int, int]] = (),
    check_crc: bool = True,
    decoded_size_max: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Decode the records at offsets `start` to `end`, `end` exclusive, of fetched batches; in one or more pieces.

    With a `share`, only its records; the offsets are then of the layout that the share is of. `decoded_size_max`
    bounds the bytes of a piece. Raises `DecodeError`, with the partition in a note.
    """
    from anabranch.records.arrow.decode import DECODED_SIZE_MAX, decode_all

    try:
        decoded: Decoded
        for decoded in decode_all(
            data,
            columns=columns,
            start_offset=start,
            end_offset=end,
            share=share,
            aborted=aborted,
            check_crc=check_crc,
            decoded_size_max=DECODED_SIZE_MAX if decoded_size_max is None else decoded_size_max,
        ):
            yield decoded.records
    except DecodeError as error:
        error.add_note(f"in {tp}")
        raise
