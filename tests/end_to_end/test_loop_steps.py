"""No step on the loop of a real broker takes 10 ms of the processor, for topics of 5,000 partitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.describe_topic_partitions import DescribeTopicPartitionsRequest, TopicRequest
from anabranch.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from anabranch.protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from anabranch.runtime.loop_steps import SLOW_STEP_S
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch

TOPIC = "wide"
COUNT = 5_000
TIMEOUT_MS, TIMEOUT_S = 120_000, 120.0
LONGEST = "anabranch_loop_step_processor_seconds_max"
BOUND_S = 2 * SLOW_STEP_S
"""On a machine that runs other tests, too, a step takes up to twice as long as it does alone."""
NUMBERS = range(COUNT)


def resize(client: WireClient, count: int) -> None:
    asked = CreatePartitionsRequest(topics=[CreatePartitionsTopic(name=TOPIC, count=count)], timeout_ms=TIMEOUT_MS)
    assert client.call(asked).results[0].error_code == ErrorCode.NONE


def assert_short(broker: BrokerProcess) -> None:
    """No step of late took long of the processor."""
    long = {name: took for name, took in broker.metrics().items() if name.startswith(LONGEST)}
    assert long and max(long.values()) < BOUND_S, long


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, WireClient]]:
    """A broker with a topic that grew from one partition to 5,000."""
    with running(tmp_path_factory.mktemp("wide")) as broker, WireClient(broker.port, TIMEOUT_S) as client:
        client.create(TOPIC, 1)
        resize(client, COUNT)
        yield broker, client


def test_growing_a_topic_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, _ = wide
    assert_short(broker)


def test_describing_every_partition_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    described = client.call(MetadataRequest(topics=[MetadataRequestTopic(name=TOPIC)], include_lineage=True))
    assert [it.partition_index for it in described.topics[0].partitions] == [*NUMBERS]
    assert described.topics[0].initial_partition_count == 1
    everything = client.call(MetadataRequest(topics=None))
    assert [len(topic.partitions) for topic in everything.topics] == [COUNT]
    asked = DescribeTopicPartitionsRequest(topics=[TopicRequest(name=TOPIC)], response_partition_limit=1_500)
    page = client.call(asked)
    assert [it.partition_index for it in page.topics[0].partitions] == [*range(1_500)]
    assert (page.next_cursor.topic_name, page.next_cursor.partition_index) == (TOPIC, 1_500)
    assert_short(broker)


@pytest.mark.parametrize("timestamp", [-1, -2, 7])
def test_listing_the_offsets_of_every_partition_takes_short_steps(
    wide: tuple[BrokerProcess, WireClient], timestamp: int
) -> None:
    broker, client = wide
    partitions = [ListOffsetsPartition(partition_index=number, timestamp=timestamp) for number in NUMBERS]
    listed = client.call(ListOffsetsRequest(topics=[ListOffsetsTopic(name=TOPIC, partitions=partitions)]))
    assert [it.partition_index for it in listed.topics[0].partitions] == [*NUMBERS]
    assert {it.error_code for it in listed.topics[0].partitions} == {0}
    assert_short(broker)


def test_telling_the_epoch_ends_of_every_partition_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    partitions = [OffsetForLeaderPartition(partition=number, leader_epoch=0) for number in NUMBERS]
    told = client.call(OffsetForLeaderEpochRequest(topics=[OffsetForLeaderTopic(topic=TOPIC, partitions=partitions)]))
    assert [it.partition for it in told.topics[0].partitions] == [*NUMBERS]
    assert_short(broker)


def test_a_session_of_every_partition_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    topic_id = client.call(MetadataRequest(topics=[MetadataRequestTopic(name=TOPIC)])).topics[0].topic_id
    partitions = [FetchPartition(partition=number, fetch_offset=0, partition_max_bytes=1 << 20) for number in NUMBERS]
    topics = [FetchTopic(topic_id=topic_id, partitions=partitions)]
    first = client.call(FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=1 << 20, topics=topics, session_epoch=0))
    assert len(first.responses[0].partitions) == COUNT and first.session_id
    again = FetchRequest(max_wait_ms=60_000, min_bytes=1, session_id=first.session_id, session_epoch=1)
    sent = client.send(again)
    with WireClient(broker.port) as producer:
        producer.produce(TOPIC, COUNT - 1, batch([b"late"]))
    changed = client.receive(sent).responses
    assert [it.partition_index for topic in changed for it in topic.partitions] == [COUNT - 1]
    assert_short(broker)


def test_shrinking_a_topic_and_growing_it_again_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    resize(client, 1)
    resize(client, COUNT)
    assert_short(broker)
