"""Sentences about partitions are short, however long the name is by which a client asks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import STRING_SIZE_MAX
from anabranch.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from anabranch.protocol.messages.elect_leaders import ElectLeadersRequest, TopicPartitions
from anabranch.server.handlers.replicas import handle_alter_partition_reassignments, handle_elect_leaders

COUNT = 50
CALL: Any = None


def broker_with(*topics: str) -> Any:
    """A broker that has these topics, whose replicas are offline."""
    topic = SimpleNamespace(exists=lambda number: True)
    return SimpleNamespace(
        settings=SimpleNamespace(node_id=0),
        view=SimpleNamespace(topic=lambda name: topic if name in topics else None),
        replicas=SimpleNamespace(get=lambda name, number: None),
    )


@pytest.mark.parametrize("name", ["t", "x" * STRING_SIZE_MAX])
def test_a_refusal_of_many_partitions_says_the_same_in_few_words(name: str) -> None:
    numbers = [*range(COUNT)]
    election = ElectLeadersRequest(topic_partitions=[TopicPartitions(topic=name, partitions=numbers)])
    elected = handle_elect_leaders(broker_with(), election, CALL).replica_election_results[0]  # type: ignore[union-attr]
    moved = handle_alter_partition_reassignments(
        broker_with(),
        AlterPartitionReassignmentsRequest(
            topics=[
                ReassignableTopic(name=name, partitions=[ReassignablePartition(partition_index=it) for it in numbers])
            ]
        ),
        CALL,
    ).responses[0]
    for found in (elected.partition_result, moved.partitions):
        assert {it.error_code for it in found} == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
        said = {it.error_message for it in found}
        assert len(found) == COUNT and len(said) == 1 and len(said.pop()) < 100


def test_an_election_among_offline_replicas_names_no_topic_again() -> None:
    name = "t" * 249
    request = ElectLeadersRequest(topic_partitions=[TopicPartitions(topic=name, partitions=[0, 1])])
    answer: Any = handle_elect_leaders(broker_with(name), request, CALL)
    (topic,) = answer.replica_election_results
    assert topic.topic == name
    assert {it.error_code for it in topic.partition_result} == {ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE}
    assert {it.error_message for it in topic.partition_result} == {"The only replica is offline."}
