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
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts
from anabranch.protocol.messages.consumer_group_heartbeat import KeyRange, PartitionKeyRanges
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


def test_the_consent_of_members_and_the_keys_of_partitions_are_read() -> None:
    parts = [PartitionKeyRanges(partition=0, ranges=[KeyRange(start=9, end=12), KeyRange(start=0, end=4)])]
    whole = PartitionKeyRanges(partition=2, ranges=[])
    response = ConsumerGroupPrepareAssignmentResponse(
        members=[
            Member(
                member_id="m",
                topic_partitions=[TopicPartition(topic_id=FLIGHTS, partitions=[0, 2], key_ranges=[*parts, whole])],
                assignor=Assignor(reason=0, metadata_version=0, metadata_bytes=memoryview(b"")),
                allow_key_share=True,
            ),
            Member(member_id="n", assignor=Assignor(reason=0, metadata_version=0, metadata_bytes=memoryview(b""))),
        ],
        topics=[
            TopicMetadata(
                topic_id=FLIGHTS,
                topic_name="flights",
                num_partitions=2,
                shares_max=16,
                intervals=[
                    PartitionKeyRanges(partition=number, ranges=[KeyRange(start=half.start, end=half.end)])
                    for number, half in enumerate(cuts(SPACE, 2))
                ],
            ),
            TopicMetadata(topic_id=WEATHER, topic_name="weather", num_partitions=1),
        ],
    )
    spec = spec_of(response)
    member, other = spec.members["m"], spec.members["n"]
    assert member.partitions == {TopicIdPartition(FLIGHTS, 0), TopicIdPartition(FLIGHTS, 2)}
    assert (member.allow_key_share, other.allow_key_share) == (True, False)
    assert member.key_ranges == {TopicIdPartition(FLIGHTS, 0): (Interval(0, 4), Interval(9, 12))}
    assert other.key_ranges == {}
    flights, weather = spec.topics[FLIGHTS], spec.topics[WEATHER]
    assert (flights.shares_max, flights.intervals) == (16, dict(enumerate(cuts(SPACE, 2))))
    assert (weather.shares_max, weather.intervals) == (0, {})
    assert hash(member) and hash(flights)


def test_ranges_of_keys_are_installed_with_the_partitions_that_are_shared() -> None:
    some = frozenset({TopicIdPartition(WEATHER, 1), TopicIdPartition(FLIGHTS, 3), TopicIdPartition(FLIGHTS, 0)})
    ranges = {
        TopicIdPartition(FLIGHTS, 3): [(0, 4), (9, 12)],
        TopicIdPartition(FLIGHTS, 0): (),
        TopicIdPartition(WEATHER, 1): cuts(SPACE, 2)[1:],
    }
    request = install_request("g", "m", 4, 7, GroupAssignment({"a": MemberAssignment(some, key_ranges=ranges)}))
    (installed,) = request.members
    assert [
        (topic.topic_id, [(it.partition, [(part.start, part.end) for part in it.ranges]) for it in topic.key_ranges])
        for topic in installed.partitions
    ] == [(FLIGHTS, [(3, [(0, 4), (9, 12)])]), (WEATHER, [(1, [(1 << 62, SPACE_END)])])]
    assert [list(topic.partitions) for topic in installed.partitions] == [[0, 3], [1]]


def test_an_assignment_is_installed_with_members_topics_and_partitions_in_order() -> None:
    some = frozenset({TopicIdPartition(WEATHER, 1), TopicIdPartition(FLIGHTS, 3), TopicIdPartition(FLIGHTS, 0)})
    computed = GroupAssignment({"b": MemberAssignment(some, AssignorMetadata(2, b"y")), "a": MemberAssignment()})
    request = install_request("g", "m", 4, 7, computed)
    assert (request.group_id, request.member_id, request.member_epoch, request.group_epoch) == ("g", "m", 4, 7)
    assert [member.member_id for member in request.members] == ["a", "b"]
    topics = [(topic.topic_id, topic.partitions) for topic in request.members[1].partitions]
    assert topics == [(FLIGHTS, [0, 3]), (WEATHER, [1])]
    assert (request.members[1].metadata_version, request.members[1].metadata_bytes, request.error) == (2, b"y", 0)
