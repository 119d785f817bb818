"""No step on the loop of a real broker takes 10 ms of the processor, for topics of 5,000 partitions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.partition.checking import BATCHES_PER_PARTITION_MAX
from anabranch.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.describe_topic_partitions import DescribeTopicPartitionsRequest, TopicRequest
from anabranch.protocol.messages.end_txn import EndTxnRequest
from anabranch.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient, batch

TOPIC = "wide"
COUNT = 5_000
TIMEOUT_MS, TIMEOUT_S = 120_000, 120.0
NUMBERS = range(COUNT)


def resize(client: WireClient, count: int) -> None:
    asked = CreatePartitionsRequest(topics=[CreatePartitionsTopic(name=TOPIC, count=count)], timeout_ms=TIMEOUT_MS)
    assert client.call(asked).results[0].error_code == ErrorCode.NONE


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, WireClient]]:
    """A broker with a topic that grew from one partition to 5,000."""
    with running(tmp_path_factory.mktemp("wide")) as broker, WireClient(broker.port, TIMEOUT_S) as client:
        client.create(TOPIC, 1)
        resize(client, COUNT)
        yield broker, client


def test_describing_every_partition_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    asked = MetadataRequest(topics=[MetadataRequestTopic(name=TOPIC)], include_lineage=True)
    described = in_short_steps(broker, lambda: client.call(asked))
    assert [it.partition_index for it in described.topics[0].partitions] == [*NUMBERS]
    assert described.topics[0].initial_partition_count == 1
    everything = in_short_steps(broker, lambda: client.call(MetadataRequest(topics=None)))
    assert [len(topic.partitions) for topic in everything.topics if topic.name == TOPIC] == [COUNT]
    paged = DescribeTopicPartitionsRequest(topics=[TopicRequest(name=TOPIC)], response_partition_limit=1_500)
    page = in_short_steps(broker, lambda: client.call(paged))
    assert [it.partition_index for it in page.topics[0].partitions] == [*range(1_500)]
    assert (page.next_cursor.topic_name, page.next_cursor.partition_index) == (TOPIC, 1_500)


@pytest.mark.parametrize("timestamp", [-1, -2, 7])
def test_listing_the_offsets_of_every_partition_takes_short_steps(
    wide: tuple[BrokerProcess, WireClient], timestamp: int
) -> None:
    broker, client = wide
    partitions = [ListOffsetsPartition(partition_index=number, timestamp=timestamp) for number in NUMBERS]

    def listed() -> list[ListOffsetsPartitionResponse]:
        asked = ListOffsetsRequest(topics=[ListOffsetsTopic(name=TOPIC, partitions=partitions)])
        found: list[ListOffsetsPartitionResponse] = client.call(asked).topics[0].partitions
        return found

    found = in_short_steps(broker, listed)
    assert [it.partition_index for it in found] == [*NUMBERS]
    # Where there are records, so many searches may be more than one request has time for: a client asks for the rest.
    while left := {it.partition_index for it in found if it.error_code == ErrorCode.OFFSET_NOT_AVAILABLE}:
        assert timestamp >= 0 and len(left) < len(partitions), "a search was made in each request"
        partitions[:] = [it for it in partitions if it.partition_index in left]
        found = listed()
    assert {it.error_code for it in found} == {0}


def test_telling_the_epoch_ends_of_every_partition_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    partitions = [OffsetForLeaderPartition(partition=number, leader_epoch=0) for number in NUMBERS]
    asked = OffsetForLeaderEpochRequest(topics=[OffsetForLeaderTopic(topic=TOPIC, partitions=partitions)])
    told = in_short_steps(broker, lambda: client.call(asked))
    assert [it.partition for it in told.topics[0].partitions] == [*NUMBERS]


def test_a_session_of_every_partition_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    topic_id = client.call(MetadataRequest(topics=[MetadataRequestTopic(name=TOPIC)])).topics[0].topic_id
    listed = [ListOffsetsPartition(partition_index=number, timestamp=-1) for number in NUMBERS]

    def changed() -> list[int]:
        ends = client.call(ListOffsetsRequest(topics=[ListOffsetsTopic(name=TOPIC, partitions=listed)])).topics[0]
        partitions = [
            FetchPartition(partition=it.partition_index, fetch_offset=it.offset, partition_max_bytes=1 << 20)
            for it in ends.partitions
        ]
        topics = [FetchTopic(topic_id=topic_id, partitions=partitions)]
        first = client.call(FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=1 << 20, topics=topics, session_epoch=0))
        assert len(first.responses[0].partitions) == COUNT and first.session_id
        sent = client.send(FetchRequest(max_wait_ms=60_000, min_bytes=1, session_id=first.session_id, session_epoch=1))
        with WireClient(broker.port) as producer:
            producer.produce(TOPIC, COUNT - 1, batch([b"late"]))
        return [it.partition_index for topic in client.receive(sent).responses for it in topic.partitions]

    assert in_short_steps(broker, changed) == [COUNT - 1]


def test_shrinking_a_topic_and_growing_it_again_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide

    def there_and_back() -> None:
        resize(client, 1)
        resize(client, COUNT)

    in_short_steps(broker, there_and_back)


def test_appending_to_every_partition_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    records = bytes(batch([b"x"]))
    data = [PartitionProduceData(index=number, records=records) for number in (*NUMBERS, *NUMBERS)]
    asked = ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=[TopicProduceData(name=TOPIC, partition_data=data)])
    answer = in_short_steps(broker, lambda: client.call(asked, 12))
    told = answer.responses[0].partition_responses
    assert [it.index for it in told] == [*NUMBERS, *NUMBERS] and not any(it.error_code for it in told)
    assert all(second.base_offset == first.base_offset + 1 for first, second in zip(told, told[COUNT:], strict=False))


@pytest.mark.parametrize("count", [1, 4, 30, 40])
def test_appending_many_batches_to_some_partitions_takes_short_steps(
    wide: tuple[BrokerProcess, WireClient], count: int
) -> None:
    broker, client = wide
    records = bytes(batch([b"x"])) * BATCHES_PER_PARTITION_MAX
    data = [PartitionProduceData(index=number, records=records) for number in range(count)]
    asked = ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=[TopicProduceData(name=TOPIC, partition_data=data)])
    first = client.call(asked, 12).responses[0].partition_responses
    told = in_short_steps(broker, lambda: client.call(asked, 12)).responses[0].partition_responses
    assert [(it.index, it.error_code) for it in told] == [(number, 0) for number in range(count)]
    assert all(
        it.base_offset >= before.base_offset + BATCHES_PER_PARTITION_MAX for it, before in zip(told, first, strict=True)
    )


@pytest.mark.parametrize("count", [8, 20])
def test_appending_large_batches_to_some_partitions_takes_short_steps(
    wide: tuple[BrokerProcess, WireClient], count: int
) -> None:
    broker, client = wide
    records = bytes(batch([b"x" * 1_000_000]))
    data = [PartitionProduceData(index=number, records=records) for number in range(count)]
    asked = ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=[TopicProduceData(name=TOPIC, partition_data=data)])
    told = in_short_steps(broker, lambda: client.call(asked, 12)).responses[0].partition_responses
    assert [(it.index, it.error_code) for it in told] == [(number, 0) for number in range(count)]


def test_a_transaction_of_every_partition_takes_short_steps(wide: tuple[BrokerProcess, WireClient]) -> None:
    broker, client = wide
    while client.call(FindCoordinatorRequest(key_type=1, coordinator_keys=["t"])).coordinators[0].error_code:
        time.sleep(0.01)
    begin = InitProducerIdRequest(transactional_id="t", transaction_timeout_ms=60_000)

    def transaction() -> tuple[set[int], ErrorCode]:
        while (begun := client.call(begin)).error_code:
            time.sleep(0.01)
        asked = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="t",
            v3_and_below_producer_id=begun.producer_id,
            v3_and_below_producer_epoch=begun.producer_epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name=TOPIC, partitions=[*NUMBERS])],
        )
        results = client.call(asked, 3).results_by_topic_v3_and_below[0].results_by_partition
        errors = {it.partition_error_code for it in results}
        end = EndTxnRequest(
            transactional_id="t", producer_id=begun.producer_id, producer_epoch=begun.producer_epoch, committed=True
        )
        ended = client.call(end, 3).error_code
        while client.call(begin).error_code == ErrorCode.CONCURRENT_TRANSACTIONS:
            time.sleep(0.01)  # Its markers are being written.
        return errors, ended

    assert in_short_steps(broker, transaction) == ({0}, 0)
