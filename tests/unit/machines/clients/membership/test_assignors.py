"""Local assignors as requests and responses carry them."""

from __future__ import annotations

from uuid import UUID

from anabranch.machines.clients.membership.assignors import (
    AssignmentSpec,
    AssignorMetadata,
    GroupAssignment,
    MemberAssignment,
    MemberSpec,
    PartitionAssignor,
    TopicIdPartition,
    TopicSpec,
    install_request,
    offer,
    spec_of,
)
from anabranch.protocol.messages.consumer_group_prepare_assignment import (
    Assignor,
    ConsumerGroupPrepareAssignmentResponse,
    Member,
    TopicMetadata,
    TopicPartition,
)

FLIGHTS, WEATHER = UUID(int=1), UUID(int=2)


class Old(PartitionAssignor):
    """Understands the metadata of classic members."""

    @property
    def name(self) -> str:
        return "old"

    @property
    def minimum_version(self) -> int:
        return -1

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        return GroupAssignment()


def test_an_offer_has_the_versions_and_the_metadata() -> None:
    (offered,) = offer((Old(),))
    assert (offered.name, offered.minimum_version, offered.maximum_version) == ("old", -1, 0)
    assert (offered.metadata_version, offered.metadata_bytes, offered.reason) == (0, b"", 0)
    assert offer(()) == ()


def test_the_group_is_read_as_the_coordinator_describes_it() -> None:
    response = ConsumerGroupPrepareAssignmentResponse(
        group_epoch=7,
        members=[
            Member(
                member_id="m",
                subscribed_topic_ids=[FLIGHTS],
                topic_partitions=[TopicPartition(topic_id=FLIGHTS, partitions=[0, 2])],
                instance_id="i",
                rack_id="r",
                assignor=Assignor(reason=3, metadata_version=1, metadata_bytes=memoryview(b"x")),
            )
        ],
        topics=[TopicMetadata(topic_id=FLIGHTS, topic_name="flights", num_partitions=4, retiring_partitions=[2, 3])],
    )
    owned = frozenset({TopicIdPartition(FLIGHTS, 0), TopicIdPartition(FLIGHTS, 2)})
    member = MemberSpec(frozenset({FLIGHTS}), owned, "i", "r", AssignorMetadata(1, b"x", 3))
    assert spec_of(response) == AssignmentSpec(7, {"m": member}, {FLIGHTS: TopicSpec("flights", 4, frozenset({2, 3}))})


def test_an_assignment_is_installed_with_members_topics_and_partitions_in_order() -> None:
    some = frozenset({TopicIdPartition(WEATHER, 1), TopicIdPartition(FLIGHTS, 3), TopicIdPartition(FLIGHTS, 0)})
    computed = GroupAssignment({"b": MemberAssignment(some, AssignorMetadata(2, b"y")), "a": MemberAssignment()})
    request = install_request("g", "m", 4, 7, computed)
    assert (request.group_id, request.member_id, request.member_epoch, request.group_epoch) == ("g", "m", 4, 7)
    assert [member.member_id for member in request.members] == ["a", "b"]
    topics = [(topic.topic_id, topic.partitions) for topic in request.members[1].partitions]
    assert topics == [(FLIGHTS, [0, 3]), (WEATHER, [1])]
    assert (request.members[1].metadata_version, request.members[1].metadata_bytes, request.error) == (2, b"y", 0)
