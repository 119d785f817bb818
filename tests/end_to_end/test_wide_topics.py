"""No step on the loop of a real broker takes 10 ms of the processor, whatever becomes of a topic of 12,000 partitions.

A broker may have 100,000. What takes a microsecond for each partition, and is not divided, shows at 12,000.
"""

from __future__ import annotations

import time
from copy import copy
from itertools import count as count_from
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionRequestPartition,
    ConsumerGroupPositionRequestTopic,
)
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.delete_groups import DeleteGroupsRequest
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient, batch

TOPIC, COUNT, GROUP = "wide", 12_000, "g"
RECORDS_IN = 2_500
"""Partitions with a record each."""
TIMEOUT_MS, TIMEOUT_S = 112_000, 120.0
UPKEEP_MS = 300
PARTITIONS = "kafka_server_replicamanager_partitioncount"


def resize(client: WireClient, count: int) -> None:
    asked = CreatePartitionsRequest(topics=[CreatePartitionsTopic(name=TOPIC, count=count)], timeout_ms=TIMEOUT_MS)
    assert client.call(asked).results[0].error_code == ErrorCode.NONE


def alter(client: WireClient, topic: str, name: str, value: str) -> None:
    configs = [AlterableConfig(name=name, config_operation=0, value=value)]
    resource = AlterConfigsResource(resource_type=2, resource_name=topic, configs=configs)
    assert client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses[0].error_code == ErrorCode.NONE


def until_partitions(broker: BrokerProcess, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while broker.metrics()[PARTITIONS] != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_wide_topic_is_configured_emptied_kept_up_and_deleted_in_short_steps(tmp_path: Path) -> None:
    with running(tmp_path, log_retention_check_interval_ms=UPKEEP_MS) as broker, WireClient(broker.port, 120) as client:
        client.create(TOPIC, COUNT)
        retentions = iter(range(1_000_000, 2_000_000))
        in_short_steps(broker, lambda: alter(client, TOPIC, "retention.ms", str(next(retentions))))

        def made_and_deleted() -> None:
            client.create(TOPIC, COUNT)
            doomed = DeleteTopicsRequest(topics=[DeleteTopicState(name=TOPIC)], timeout_ms=TIMEOUT_MS)
            assert client.call(doomed).responses[0].error_code == ErrorCode.NONE

        client.call(DeleteTopicsRequest(topics=[DeleteTopicState(name=TOPIC)], timeout_ms=TIMEOUT_MS))
        in_short_steps(broker, made_and_deleted)
        client.create(TOPIC, 1)

        def there_and_back() -> None:
            resize(client, COUNT)
            resize(client, 1)
            until_partitions(broker, 1)
            time.sleep(2 * UPKEEP_MS / 1000)  # The upkeep forgets what is remembered of the partitions removed.

        in_short_steps(broker, there_and_back)


def test_the_load_of_a_wide_topic_begins_to_be_observed_in_short_steps(tmp_path: Path) -> None:
    with running(tmp_path) as broker, WireClient(broker.port, 120) as client:
        numbers = count_from(1)

        def observed() -> None:
            number = next(numbers)
            client.create(f"{TOPIC}-{number}", RECORDS_IN)
            alter(client, f"{TOPIC}-{number}", "accept.range.fetch", "true")  # All of them are new at one look.
            deadline = time.monotonic() + TIMEOUT_S
            while broker.metrics()["anabranch_load_partitions"] != number * RECORDS_IN:
                assert time.monotonic() < deadline
                time.sleep(0.05)

        in_short_steps(broker, observed)


def beat(
    client: WireClient, member_id: str, epoch: int, owned: list[TopicPartitions] | None = None
) -> ConsumerGroupHeartbeatResponse:
    """A heartbeat of a member, until the coordinator is loaded; it joins at epoch 0."""
    joins = epoch == 0
    request = ConsumerGroupHeartbeatRequest(
        group_id=GROUP,
        member_id=member_id,
        member_epoch=epoch,
        rebalance_timeout_ms=60_000 if joins else -1,
        subscribed_topic_names=[TOPIC] if joins else None,
        topic_partitions=owned,
    )
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        answer: ConsumerGroupHeartbeatResponse = client.call(request)
        if answer.error_code not in (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR):
            assert answer.error_code == ErrorCode.NONE, answer
            return answer
        assert time.monotonic() < deadline
        time.sleep(0.05)


def owned_by(answer: ConsumerGroupHeartbeatResponse) -> list[TopicPartitions]:
    """The partitions that an answer gives a member, as the member reports them."""
    assert answer.assignment is not None
    given = answer.assignment.topic_partitions
    return [TopicPartitions(topic_id=it.topic_id, partitions=list(it.partitions)) for it in given]


def count(owned: list[TopicPartitions]) -> int:
    return sum(len(it.partitions) for it in owned)


def test_a_group_on_a_wide_topic_is_joined_shared_described_and_left_in_short_steps(tmp_path: Path) -> None:
    with running(tmp_path) as broker, WireClient(broker.port, 120) as client, WireClient(broker.port, 120) as other:
        client.create(TOPIC, COUNT)
        while client.call(FindCoordinatorRequest(coordinator_keys=[GROUP])).coordinators[0].error_code:
            time.sleep(0.05)
        members = (f"member-{number}" for number in range(1_000))

        def joined_shared_and_left() -> None:
            one, two = next(members), next(members)
            first = beat(client, one, 0, [])
            assert count(owned_by(first)) == COUNT
            beat(client, one, first.member_epoch, owned_by(first))
            second = beat(other, two, 0, [])
            told = beat(client, one, first.member_epoch)
            moved = beat(client, one, first.member_epoch, owned_by(told))
            given = beat(other, two, second.member_epoch)
            assert count(owned_by(moved)) == count(owned_by(given)) == COUNT // 2
            positions = [
                ConsumerGroupPositionRequestPartition(partition=number, need_position=True) for number in range(COUNT)
            ]
            asked = ConsumerGroupPositionRequest(
                group_id=GROUP,
                generation_id=moved.member_epoch,
                member_id=one,
                topics=[ConsumerGroupPositionRequestTopic(topic=TOPIC, partitions=positions)],
            )
            answer = client.call(asked)
            assert answer.error_code == ErrorCode.NONE and len(answer.topics[0].partitions) == COUNT
            described = client.call(ConsumerGroupDescribeRequest(group_ids=[GROUP])).groups[0]
            assert described.group_state == "Stable" and len(described.members) == 2
            beat(other, two, -1)
            beat(client, one, -1)

        in_short_steps(broker, joined_shared_and_left)
        last = beat(client, "last", 0, [])
        offsets = [
            OffsetCommitRequestPartition(partition_index=number, committed_offset=0, committed_metadata="")
            for number in range(COUNT)
        ]
        committing = OffsetCommitRequest(
            group_id=GROUP,
            generation_id_or_member_epoch=last.member_epoch,
            member_id="last",
            topics=[OffsetCommitRequestTopic(name=TOPIC, topic_id=client.metadata(TOPIC).topic_id, partitions=offsets)],
        )
        committed = in_short_steps(broker, lambda: client.call(committing))
        assert {it.error_code for it in committed.topics[0].partitions} == {ErrorCode.NONE}
        beat(client, "last", -1)

        def deleted() -> None:
            client.call(committing_again)
            answer = client.call(DeleteGroupsRequest(groups_names=[GROUP]))
            assert answer.results[0].error_code == ErrorCode.NONE

        committing_again = copy(committing)
        committing_again.generation_id_or_member_epoch, committing_again.member_id = -1, ""
        in_short_steps(broker, deleted)
    assert not broker.said("error")


def test_a_wide_topic_with_records_is_resized_under_a_group_in_short_steps(tmp_path: Path) -> None:
    """Its coordinator knows where every partition of the layout before ends, before anybody sees the next one."""
    with running(tmp_path) as broker, WireClient(broker.port, 120) as client, WireClient(broker.port, 120) as other:
        client.create(TOPIC, RECORDS_IN)
        partitions = [PartitionProduceData(index=it, records=bytes(batch([b"v"]))) for it in range(RECORDS_IN)]
        data = [TopicProduceData(name=TOPIC, partition_data=partitions)]
        client.call(ProduceRequest(transactional_id=None, acks=1, timeout_ms=TIMEOUT_MS, topic_data=data), 9)
        while client.call(FindCoordinatorRequest(coordinator_keys=[GROUP])).coordinators[0].error_code:
            time.sleep(0.05)
        member = beat(other, "member", 0, [])
        assert count(owned_by(member)) == RECORDS_IN
        epoch, counts = member.member_epoch, iter([RECORDS_IN + 10, RECORDS_IN, RECORDS_IN + 5, RECORDS_IN] * 2)

        def resized_under_it() -> None:
            nonlocal epoch
            for _ in range(2):
                resize(client, next(counts))
                deadline = time.monotonic() + TIMEOUT_S
                told = answer = beat(other, "member", epoch)
                while answer.member_epoch == epoch:  # Where it is to give up partitions, until it says that it has.
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                    answer = beat(other, "member", epoch, owned_by(told) if told.assignment else None)
                    told = answer if answer.assignment else told
                epoch = answer.member_epoch

        in_short_steps(broker, resized_under_it)
    assert not broker.said("error")
