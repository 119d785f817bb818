"""The range reader: ranges in order, the next fetch under way, errors tried again, lost offsets passed over."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, DecodeError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.connection import Connection, ConnectionSettings
from anabranch.client.cluster.metadata import PartitionInfo, TopicInfo
from anabranch.client.cluster.turns import Turns
from anabranch.client.consumer import range_reader
from anabranch.client.consumer.range_reader import (
    OffsetRange,
    OffsetsGoneError,
    RangeReader,
    RangeReaderSettings,
    decode_range,
    next_offset_of,
)
from anabranch.machines.keyspace import Interval
from anabranch.machines.partition.sharing import Asked
from anabranch.protocol.messages.fetch import (
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from anabranch.records.arrow import slabs
from anabranch.records.arrow.slabs import Shelf
from anabranch.records.batch import build
from tests.support.scripted_broker import ScriptedBroker, together

ROWS = bytes.fromhex("10 00 00 00 02 61 02 62 00")
"""One record with key `a` and value `b`."""


class Range(NamedTuple):
    topic: str
    partition: int
    start: int
    end: int
    topic_id: str = ""


def batch(offset: int) -> bytes:
    return bytes(build(ROWS, record_count=1, base_timestamp=5, max_timestamp=5, base_offset=offset))


class Scripted(RangeReader):
    """A reader whose broker has one record per batch, and fails as told."""

    def __init__(self, *failures: Exception, log_start: int = 0, records_per_fetch: int = 2, **settings: int) -> None:
        self.failures = list(failures)
        self.unknown: list[Exception] = []
        """Errors of brokers that are asked for the topic."""
        self.log_start = log_start
        self.records_per_fetch = records_per_fetch
        self.asked: list[tuple[int, int, int]] = []
        self.gone: list[OffsetsGoneError] = []
        self.answered = threading.Semaphore(0)
        super().__init__("127.0.0.1:1", ConnectionSettings(), RangeReaderSettings(**settings), self.on_gone)  # type: ignore[arg-type]

    def on_gone(self, wanted: OffsetRange, gone: OffsetsGoneError) -> None:
        self.gone.append(gone)

    async def _info(self, tp: TopicPartition, turns: Turns) -> TopicInfo:
        if self.unknown:
            raise self.unknown.pop(0)
        return TopicInfo("t", NO_TOPIC_ID, {}, 1, 1, (), elastic=False)

    async def _ask(
        self, info: TopicInfo, wanted: OffsetRange, offset: int, size: int, asked: Asked | None
    ) -> range_reader._Found | None:
        tp = TopicPartition(wanted.topic, wanted.partition)
        self.asked.append((tp.partition, offset, size))
        if self.failures:
            raise self.failures.pop(0)
        if offset < self.log_start:
            raise OffsetsGoneError(tp, offset, self.log_start, "it is gone")
        data = b"".join(batch(offset + number) for number in range(self.records_per_fetch))
        self.answered.release()
        return range_reader._Found(offset, memoryview(data), offset + self.records_per_fetch)


def offsets(reader: RangeReader, *ranges: Range) -> Iterator[tuple[int, int]]:
    for fetched in reader.read(ranges):
        tp = TopicPartition(fetched.range.topic, fetched.range.partition)
        for records in decode_range(tp, fetched.data, fetched.start, fetched.range.end, columns=("offset",)):
            yield from ((fetched.range.partition, offset) for offset in records.column(0).to_pylist())


def test_ranges_are_read_one_after_the_other_to_exactly_their_ends() -> None:
    reader = Scripted()
    read = list(offsets(reader, Range("t", 0, 3, 6), Range("t", 1, 0, 1)))
    assert read == [(0, 3), (0, 4), (0, 5), (1, 0)]
    assert [(partition, offset) for partition, offset, _ in reader.asked] == [(0, 3), (0, 5), (1, 0)]
    assert list(offsets(reader)) == []


def test_the_next_fetch_is_under_way_before_the_last_is_given() -> None:
    reader = Scripted()
    steps = reader.read([Range("t", 0, 0, 4)])
    next(steps)
    assert all(reader.answered.acquire(timeout=10) for _ in range(2))
    steps.close()


def test_a_fetch_is_as_large_as_what_is_left_seems_to_need() -> None:
    reader = Scripted(max_partition_fetch_bytes=100_000)
    list(offsets(reader, Range("t", 0, 0, 4_000)))
    assert reader.asked[0][2] == 100_000, "of records whose size is not known"
    assert reader.asked[-1][2] == range_reader.FETCH_SIZE_MIN


def test_errors_that_pass_are_tried_again_and_others_are_raised() -> None:
    passing = ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "moved"), ConnectionResetError("gone")
    reader = Scripted(*passing)
    assert list(offsets(reader, Range("t", 0, 0, 1))) == [(0, 0)] and len(reader.asked) == 3
    with pytest.raises(ApiError, match="not yours"):
        list(offsets(Scripted(ApiError(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "not yours")), Range("t", 0, 0, 1)))
    with pytest.raises(DecodeError, match="torn"):
        list(offsets(Scripted(DecodeError("torn")), Range("t", 0, 0, 1)))


def test_after_the_timeout_the_error_says_how_long_it_was_tried() -> None:
    reader = Scripted(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "moved"), retry_timeout_ms=0)
    with pytest.raises(ApiError, match="moved") as refused:
        list(offsets(reader, Range("t", 0, 0, 1)))
    assert refused.value.__notes__ == ["Tried for 0 ms (retry timeout)."]


def test_offsets_that_are_gone_are_reported_and_passed_over() -> None:
    reader = Scripted(log_start=3)
    assert list(offsets(reader, Range("t", 0, 1, 5))) == [(0, 3), (0, 4)]
    assert [(gone.offset, gone.available) for gone in reader.gone] == [(1, 3)]


@pytest.mark.parametrize("partitions", [{0: True}, {0: False}, {}, None])
def test_whether_a_partition_has_retired_is_asked_where_its_records_are_gone(
    partitions: dict[int, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resize may have come after the range was planned; where no broker answers, it is not known to have."""
    reader = Scripted(log_start=3)

    async def topic(name: str) -> TopicInfo:
        if partitions is None:
            raise ConnectionError("no broker")
        found = {number: PartitionInfo(number, 1, 5, retiring=retiring) for number, retiring in partitions.items()}
        return TopicInfo(name, NO_TOPIC_ID, found, 1, 1, (), elastic=True)

    monkeypatch.setattr(reader._cluster, "topic", topic)
    list(offsets(reader, Range("t", 0, 1, 5)))
    (gone,) = reader.gone
    assert gone.has_retired is (partitions in ({0: True}, {}))


OTHER = OffsetsGoneError(TopicPartition("t", 0), 0, None, "created again", is_of_another_topic=True)
REMOVED = OffsetsGoneError(TopicPartition("t", 0), 0, None, "the partition was removed")


@pytest.mark.parametrize("said", [OTHER, REMOVED])
def test_a_topic_counts_as_made_anew_or_a_partition_as_removed_when_brokers_go_on_to_say_so(
    said: OffsetsGoneError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "RETRY_INTERVAL_S", 0)
    late = Scripted(*[said] * (range_reader.GONE_ATTEMPTS - 1))
    assert list(offsets(late, Range("t", 0, 0, 2))) == [(0, 0), (0, 1)] and late.gone == []
    gone = Scripted(*[said] * range_reader.GONE_ATTEMPTS)
    assert list(offsets(gone, Range("t", 0, 0, 2), Range("t", 1, 0, 1))) == [(1, 0)] and gone.gone == [said]


def test_a_partition_that_a_broker_knows_meanwhile_is_not_removed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is only its leader that cannot be reached; a broker that cannot be reached says nothing."""
    monkeypatch.setattr(range_reader, "RETRY_INTERVAL_S", 0)
    half = [REMOVED] * (range_reader.GONE_ATTEMPTS // 2)
    known = Scripted(*half, ConnectionResetError("of the leader"), *half)
    assert list(offsets(known, Range("t", 0, 0, 2))) == [(0, 0), (0, 1)] and known.gone == []
    unheard = Scripted(*half, *half)
    unheard.unknown = [ConnectionResetError("of a broker")] * 3
    assert list(offsets(unheard, Range("t", 0, 0, 2))) == [] and unheard.gone == [REMOVED]


@pytest.mark.parametrize(
    ("code", "is_gone"),
    [
        (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, True),
        (ErrorCode.UNKNOWN_TOPIC_ID, True),
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, False),
    ],
)
def test_a_leader_that_does_not_know_a_partition_does_not_say_that_it_is_there(
    code: ErrorCode, is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was named by a broker that has not heard of the removal; one that has lost the leadership knows it."""
    monkeypatch.setattr(range_reader, "RETRY_INTERVAL_S", 0)
    half = [REMOVED] * (range_reader.GONE_ATTEMPTS // 2)
    reader = Scripted(*half, ApiError(code, "t-0 is not here"), *half)
    read = list(offsets(reader, Range("t", 0, 0, 2)))
    assert (read, reader.gone) == (([], [REMOVED]) if is_gone else ([(0, 0), (0, 1)], []))


def test_other_brokers_are_asked_for_a_partition_that_one_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that is open leads to that one, as after a restart of the others."""
    monkeypatch.setattr(range_reader, "RETRY_INTERVAL_S", 0)
    late, others = ScriptedBroker({"t": 1}), [ScriptedBroker({"t": 2}) for _ in range(2)]
    found = [FetchableTopicResponse(topic="t", partitions=[PartitionData(partition_index=1, records=batch(0))])]
    others[0].on(FetchRequest, lambda _: FetchResponse(responses=found))
    settings = ConnectionSettings(connect=together(others[0], late, others[1]))
    gone: list[OffsetsGoneError] = []
    reader = RangeReader("broker2:9092", settings, RangeReaderSettings(), lambda _, error: gone.append(error))
    assert list(offsets(reader, Range("t", 1, 0, 1))) == [(1, 0)] and gone == []


@pytest.mark.parametrize("said", [OTHER, REMOVED])
def test_it_counts_as_gone_at_the_end_of_a_time_limit_that_is_shorter_than_the_attempts(said: OffsetsGoneError) -> None:
    reader = Scripted(said, retry_timeout_ms=-1)
    assert list(offsets(reader, Range("t", 0, 0, 2), Range("t", 1, 0, 1))) == [(1, 0)] and reader.gone == [said]


@pytest.mark.parametrize(
    ("offset", "said", "earliest", "available", "why"),
    [
        (3, 5, None, 5, "the records there were deleted"),
        (3, -1, 5, 5, "the records there were deleted"),
        (9, 5, None, 5, "the log ends before"),
        (9, -1, 5, 5, "the log ends before"),
    ],
)
def test_an_offset_out_of_range_is_told_with_the_log_start_also_where_the_broker_does_not_say_it(
    offset: int, said: int, earliest: int | None, available: int, why: str
) -> None:
    broker = ScriptedBroker({"t": 1})
    refused = PartitionData(error_code=ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=said)
    topics = [FetchableTopicResponse(topic="t", partitions=[refused])]
    broker.on(FetchRequest, lambda _: FetchResponse(responses=topics))
    if earliest is not None:
        named = [ListOffsetsPartitionResponse(offset=earliest)]
        answer = ListOffsetsResponse(topics=[ListOffsetsTopicResponse(name="t", partitions=named)])
        broker.on(ListOffsetsRequest, lambda _: answer)
    found: list[OffsetsGoneError] = []
    settings = ConnectionSettings(connect=broker.connect)
    reader = RangeReader("broker:9092", settings, RangeReaderSettings(), lambda _, gone: found.append(gone))
    list(reader.read([Range("t", 0, offset, offset + 1)]))
    assert [(gone.offset, gone.available, gone.why) for gone in found] == [(offset, available, why)]


def test_what_a_fetch_asks_for() -> None:
    """Committed records; and of some keys, of which there may be none, only what there is."""
    tp, settings = TopicPartition("t", 4), RangeReaderSettings()
    plain = range_reader._request(tp, UUID(int=9), 7, 100, settings, None)
    assert (plain.isolation_level, plain.min_bytes, plain.topics[0].partitions[0]) == (
        1,
        1,
        FetchPartition(partition=4, fetch_offset=7, partition_max_bytes=100),
    )
    assert (plain.topics[0].topic, plain.topics[0].topic_id) == ("t", UUID(int=9))
    some = range_reader._request(
        tp, NO_TOPIC_ID, 7, 100, RangeReaderSettings(read_committed=False), Asked((Interval(3, 5),), (b"k",))
    )
    (asked,) = some.topics[0].partitions
    assert (some.isolation_level, some.min_bytes) == (0, 0)
    assert [(each.start, each.end) for each in asked.key_ranges] == [(3, 5)]
    assert asked.filter is not None and list(asked.filter.keys_wanted) == [b"k"]


def test_the_next_offset_is_that_after_the_last_whole_batch() -> None:
    data = batch(7) + batch(8)
    assert next_offset_of(memoryview(data)) == 9
    assert next_offset_of(memoryview(data[:-1])) == 8
    assert next_offset_of(memoryview(data[:40])) is None
    with pytest.raises(DecodeError, match="too short for its header"):
        next_offset_of(memoryview(data[:8] + bytes(4) + data[12:]))


def test_a_malformed_batch_is_told_with_its_partition() -> None:
    data = bytearray(batch(0))
    data[-1] ^= 1
    with pytest.raises(DecodeError) as malformed:
        list(decode_range(TopicPartition("t", 4), memoryview(data), 0, 1, columns=("offset",)))
    assert malformed.value.__notes__ == ["in t-4"]


def test_frames_are_received_into_memory_that_is_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory for every frame would cost as much as to fill it."""
    shelf = Shelf()
    monkeypatch.setattr(slabs, "shelf", shelf)

    async def connected(make: Callable[[], Connection], host: str, port: int) -> Connection:
        return make()

    async def receive() -> None:
        connection = await range_reader._with_slabs(connected)(lambda: Connection("b", "c"), "b", 1)
        start = range_reader.FETCH_SIZE_MAX.to_bytes(4, "big") + b"head"
        connection.get_buffer(-1)[: len(start)] = start
        connection.buffer_updated(len(start))
        assert len(connection.get_buffer(-1)) == range_reader.FETCH_SIZE_MAX - len(b"head")

    for _ in range(2):
        asyncio.run(receive())
        gc.collect()
        assert [memory.size for memory in shelf._idle] == [16 * 1024 * 1024], "the whole answer fits into one slab"
