"""Snapshots from brokers that have heard of topics and partitions late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.cluster.connection import Connection, ConnectionSettings
from anabranch.client.cluster.metadata import Cluster
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from anabranch.protocol.messages.metadata import MetadataRequest
from anabranch.spark.options import EARLIEST, OptionError, parse
from anabranch.spark.plan import TopicOffsets, missing_of, offsets_from_json
from anabranch.spark.snapshot import SLOW_RETRIES_S, SnapshotReader
from anabranch.spark.source import StreamReader, full_schema
from tests.support.scripted_broker import ScriptedBroker, together, topic_id

ID = topic_id("t").hex
KNOWN = {"t": TopicOffsets({0: 9, 1: 9, 2: 9, 3: 9}, ID, 1, removed={}, partitions=4)}
RETRIES = 3


def brokers(*counts: int | None) -> ScriptedBroker:
    """Answer requests for metadata one after the other, each time with so many partitions of topic `t`, or no topic."""
    broker = ScriptedBroker()
    left = list(counts)

    def answer(request: MetadataRequest) -> Any:
        count = left.pop(0) if len(left) > 1 else left[0]
        broker.topics = {} if count is None else {"t": count}
        return broker._metadata(request)

    def offsets(request: ListOffsetsRequest) -> ListOffsetsResponse:
        return ListOffsetsResponse(
            topics=[
                ListOffsetsTopicResponse(
                    name=topic.name,
                    partitions=[
                        ListOffsetsPartitionResponse(
                            partition_index=each.partition_index, offset=0 if each.timestamp == EARLIEST else 12
                        )
                        for each in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    broker.on(MetadataRequest, answer)
    broker.on(ListOffsetsRequest, offsets)
    return broker


@contextmanager
def reading(broker: ScriptedBroker, **given: str) -> Iterator[SnapshotReader]:
    named = {"subscribe": "t"} if "subscribePattern" not in given else {}
    retries = {"fetchOffset.numRetries": str(RETRIES), "fetchOffset.retryIntervalMs": "0"}
    reader = SnapshotReader(parse({"bootstrap.servers": "broker:9092", **named, **retries, **given}))
    reader._cluster = broker.cluster()
    try:
        yield reader
    finally:
        reader.close()


@pytest.mark.parametrize("given", [{}, {"subscribePattern": "t.*"}], ids=str)
@pytest.mark.parametrize("counts", [(2, 2, 4), (2, 2, 2, 2, 4), (None, None, 4), (4, None, None, 2, 4)], ids=str)
def test_brokers_that_know_less_than_the_query_are_asked_again(
    counts: tuple[int | None, ...], given: dict[str, str]
) -> None:
    with reading(brokers(*counts), **given) as reader:
        assert reader.read(KNOWN)["t"].ends == dict.fromkeys(range(4), 12)


def test_partitions_that_no_broker_names_any_more_are_not_given_up() -> None:
    broker = brokers(2)
    with (
        reading(broker) as reader,
        pytest.raises(ApiError, match="name no partition 2 of topic t, which had it before"),
    ):
        reader.read(KNOWN)
    assert len(broker.requests(MetadataRequest)) == 1 + 1 + RETRIES


@pytest.mark.parametrize("given", [{}, {"subscribePattern": "t.*"}], ids=str)
def test_a_topic_that_no_broker_knows_any_more_counts_as_deleted(given: dict[str, str]) -> None:
    broker = brokers(4, 4, None)
    with reading(broker, **given) as reader:
        assert reader.read().keys() == {"t"}
        reader._asked_at = float("-inf")
        assert reader.read(KNOWN) == {}
        assert len(broker.requests(MetadataRequest)) == 2 + 1 + 1 + RETRIES
        # It is not waited for where the query has no offsets of it.
        assert reader.read() == {}


def test_a_topic_that_does_not_exist_when_the_query_begins_is_refused_at_once() -> None:
    broker = brokers(None)
    with reading(broker) as reader, pytest.raises(OptionError, match="topic 't', which does not exist"):
        reader.read(begins=True)
    assert len(broker.requests(MetadataRequest)) == 3, "one for the list, one for the topic, one for what there is"


def test_a_query_stays_in_partitions_that_one_broker_does_not_name() -> None:
    """They would come back as new ones, and be read again from offset 0."""
    broker = brokers(4, 4, 2, 2, 4)
    options = {"fetchOffset.retryIntervalMs": "0", "startingOffsets": "earliest"}
    stream = StreamReader(
        parse({"bootstrap.servers": "broker:9092", "subscribe": "t", **options}), full_schema(headers=False)
    )
    with reading(broker) as reader:
        stream._snapshot_reader = reader
        start = stream.initialOffset()
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        assert offsets_from_json(end)["t"].offsets == dict.fromkeys(range(4), 12)
        reader._asked_at = float("-inf")
        assert stream.latestOffset(end, stream.getDefaultReadLimit()) == end
        # Nor is a planned micro-batch run without them, when a query is restarted for what is available.
        broker.on(MetadataRequest, brokers(2, 2, 2, 4).answer)
        reader._asked_at = float("-inf")
        stream.prepareForTriggerAvailableNow()
        tasks = stream.partitions(start, end)
        assert sorted(read.partition for task in tasks for read in task.value.reads) == [0, 1, 2, 3]


def test_a_first_micro_batch_that_is_run_again_has_the_topics_that_it_was_planned_with() -> None:
    """Also where the broker that is asked first, for the offsets where the query begins, has not heard of one."""
    options = parse({"bootstrap.servers": "broker:9092", "subscribePattern": "t.*", "startingOffsets": "earliest"})
    schema = full_schema(headers=False)
    planned, run = StreamReader(options, schema), StreamReader(options, schema)
    with reading(brokers(4), subscribePattern="t.*") as planned._snapshot_reader:
        start = planned.initialOffset()
        end = planned.latestOffset(start, planned.getDefaultReadLimit())
    with reading(brokers(None, 4), subscribePattern="t.*") as run._snapshot_reader:
        assert run.initialOffset() == {}
        tasks = run.partitions(start, end)
    assert sorted(read.partition for task in tasks for read in task.value.reads) == [0, 1, 2, 3]


@pytest.mark.parametrize("retries", [0, RETRIES])
@pytest.mark.parametrize("late", [2, None])
def test_every_broker_is_asked_before_one_that_has_heard_less_is_believed(late: int | None, retries: int) -> None:
    """The connection that is open leads to that one, as after a restart of the others."""
    one, others = brokers(late), [brokers(4) for _ in range(5)]
    connect = together(*others, one)
    with reading(one, **{"fetchOffset.numRetries": str(retries)}) as reader:
        reader._cluster = Cluster("broker6:9092", ConnectionSettings(connect=connect))
        assert reader.read(KNOWN)["t"].ends == dict.fromkeys(range(4), 12)


def test_a_topic_just_made_is_waited_for_though_the_next_broker_has_not_heard_of_it() -> None:
    """The query begins on it: the first broker knows it, and no leader yet."""
    late, knows = brokers(None, 4), brokers(4)
    ready, told = knows._handlers[ListOffsetsRequest], late._handlers[MetadataRequest]
    asked: list[MetadataRequest] = []

    def offsets(request: ListOffsetsRequest) -> Any:
        answer = ready(request)
        for part in answer.topics[0].partitions:
            part.error_code = ErrorCode.NONE if asked else ErrorCode.LEADER_NOT_AVAILABLE
        return answer

    def metadata(request: MetadataRequest) -> Any:
        asked.extend([request] if request.topics else [])
        return told(request)

    knows.on(ListOffsetsRequest, offsets)
    late.on(MetadataRequest, metadata)
    connect = together(knows, late)
    with reading(knows) as reader:
        reader._cluster = Cluster("broker1:9092", ConnectionSettings(connect=connect))
        assert len(reader.read()["t"].ends) == 4


def test_a_topic_that_no_broker_in_reach_knows_counts_as_deleted() -> None:
    one, other = brokers(None), brokers(4)
    connect, other.reachable = together(other, one), False
    with reading(one) as reader:
        reader._cluster, reader._began = Cluster("broker2:9092", ConnectionSettings(connect=connect)), True
        assert reader.read(KNOWN) == {}


@pytest.mark.parametrize("retries", [RETRIES, RETRIES + 1, RETRIES + 2])
def test_a_topic_of_which_the_leader_cannot_be_reached_does_not_count_as_deleted(retries: int) -> None:
    """One broker has not heard of it, and the other has: whichever answers last."""
    late, other, leader = brokers(None), brokers(4), ScriptedBroker()
    connect, leader.reachable = together(leader, late, other), False
    with reading(late, **{"fetchOffset.numRetries": str(retries)}) as reader:
        reader._cluster, reader._began = Cluster("broker2:9092", ConnectionSettings(connect=connect)), True
        with pytest.raises(ConnectionError, match="no connection to broker1"):
            reader.read(KNOWN)


def test_brokers_that_are_slow_to_fail_are_not_asked_a_hundred_times() -> None:
    """A leader to which packets are dropped: each try takes the time limit of a connection, which is 10 s."""
    one, leader = brokers(4), ScriptedBroker()
    connect, leader.reachable = together(leader, one), False
    now = [0.0]

    async def slow_to_fail(make: Callable[[], Connection], host: str, port: int, /) -> Connection:
        try:
            return await connect(make, host, port)
        except ConnectionError:
            now[0] += 10
            raise

    with reading(one, **{"fetchOffset.numRetries": "100"}) as reader:
        cluster = Cluster("broker2:9092", ConnectionSettings(connect=slow_to_fail))
        reader._cluster, reader._began, reader._clock = cluster, True, lambda: now[0]
        with pytest.raises(ConnectionError, match="no connection to broker1"):
            reader.read(KNOWN)
        assert SLOW_RETRIES_S < now[0] < SLOW_RETRIES_S + 60
        reader._cluster = Cluster("broker1:9092", ConnectionSettings(connect=slow_to_fail))
        began, reader._asked_at = now[0], float("-inf")
        with pytest.raises(ConnectionError):
            reader.read(KNOWN)
        assert SLOW_RETRIES_S < now[0] - began < SLOW_RETRIES_S + 60


@pytest.mark.parametrize(
    ("known", "existing", "elastic", "missing"),
    [
        (KNOWN["t"], {0, 1}, False, [2, 3]),
        (KNOWN["t"], {0, 1, 2, 3, 4}, False, []),
        (TopicOffsets({0: 9}, ID, 1, partitions=3), {0, 1}, False, [2]),
        (TopicOffsets({1: 9}, ID, 1), {0}, False, [1]),
        # Partitions of elastic topics are removed; another topic has its own; and a query that begins knows none.
        (KNOWN["t"], {0, 1}, True, []),
        (TopicOffsets({1: 9}, "other", 1), {0}, False, []),
        (None, {0}, False, []),
    ],
)
def test_which_partitions_a_broker_must_name(
    known: TopicOffsets | None, existing: set[int], elastic: bool, missing: list[int]
) -> None:
    assert list(missing_of(known, ID, existing, elastic=elastic)) == missing


def test_high_watermarks_are_asked_for_positions_in_partitions_that_are_left_out_too() -> None:
    """Named again, they are read on there: beyond the last stable offset, it seemed that the log had been cut."""
    asked: list[Any] = []
    reader = object.__new__(StreamReader)
    reader._snapshot_reader = SimpleNamespace(
        read=lambda known, begins: {},
        with_high_watermarks=lambda snapshots, positions: asked.append(positions) or snapshots,
    )  # type: ignore[assignment]
    reader._read_snapshots({"t": replace(KNOWN["t"], offsets={0: 9}, left={1: 100})})
    assert asked == [{"t": {0: 9, 1: 100}}]
