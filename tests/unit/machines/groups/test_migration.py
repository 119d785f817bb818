"""Between the protocols, online: the proposal's worked example (KIP-848, Online Migration) and what it leaves out."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.settings import GroupSettings
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupResponse
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment, SyncGroupResponse
from tests.support.groups import GROUP, GroupWorld, assigned, assignment, subscription, topics

EAGER = {"range": subscription("foo")}


class Classic:
    """A classic member as a client plays it."""

    def __init__(self, world: GroupWorld, name: str, *, protocol: str = "range", version: int = 3) -> None:
        self.world, self.name, self.protocol, self.version = world, name, protocol, version
        self.generation = -1
        self.owned = ""
        self.ticket: Any = None

    def protocols(self) -> dict[str, bytes]:
        owned = self.owned if "cooperative" in self.protocol else ""
        return {self.protocol: subscription("foo", owned=owned, generation=self.generation, version=self.version)}

    def join(self) -> JoinGroupResponse:
        answer = self.world.join_classic(self.name, self.protocols())
        assert isinstance(answer, JoinGroupResponse), answer
        assert answer.error_code == ErrorCode.NONE, answer
        self.generation = answer.generation_id
        return answer

    def sync(self) -> str:
        answer = self.world.sync_classic(self.name, self.generation)
        assert isinstance(answer, SyncGroupResponse)
        assert answer.error_code == ErrorCode.NONE, answer
        self.owned = assigned(answer.assignment)
        return self.owned

    def beat(self) -> ErrorCode:
        return self.world.beat_classic(self.name, self.generation)


def stable_classic(world: GroupWorld, generation: int, protocol: str = "range", **shares: str) -> dict[str, Classic]:
    """Let classic members join, and rebalance until a generation; the leader gives out `shares`."""
    members = {}
    for name in shares:
        answer = world.join_classic("", {protocol: subscription("foo")}, fresh=name)
        assert isinstance(answer, JoinGroupResponse)
        assert answer.error_code == ErrorCode.MEMBER_ID_REQUIRED
        members[name] = Classic(world, answer.member_id, protocol=protocol)
    given = [
        SyncGroupRequestAssignment(member_id=members[name].name, assignment=assignment(share))
        for name, share in shares.items()
    ]
    for number in range(generation):
        tickets = {
            name: world.join_classic(member.name, member.protocols(), session_timeout_ms=1_800_000)
            for name, member in members.items()
        }
        if number == 0:
            world.advance(3 * world.settings.initial_rebalance_delay_ms)
        for name, member in members.items():
            told = tickets[name]
            answer = told if isinstance(told, JoinGroupResponse) else world.answers[told]
            assert answer.error_code == ErrorCode.NONE
            member.generation = answer.generation_id
            leader = answer.leader
        syncs = {
            name: world.sync_classic(member.name, member.generation, given if member.name == leader else ())
            for name, member in members.items()
        }
        for name, member in members.items():
            told = syncs[name]
            answer = told if isinstance(told, SyncGroupResponse) else world.answers[told]
            member.owned = assigned(answer.assignment)
            assert member.owned == shares[name]
    return members


def rebalance(world: GroupWorld, members: dict[str, Classic], shares: dict[str, str]) -> None:
    """Let all classic members join again, and the leader give out `shares`."""
    tickets = {name: world.join_classic(member.name, member.protocols()) for name, member in members.items()}
    answers = {
        name: ticket if isinstance(ticket, JoinGroupResponse) else world.answers[ticket]
        for name, ticket in tickets.items()
    }
    leader = next(name for name, answer in answers.items() if answer.member_id == answer.leader)
    given = [
        SyncGroupRequestAssignment(member_id=members[name].name, assignment=assignment(share))
        for name, share in shares.items()
    ]
    for name in sorted(members, key=lambda name: name != leader):
        generation = answers[name].generation_id
        world.sync_classic(members[name].name, generation, given if name == leader else ())
        members[name].generation = generation


def test_online_migration_as_the_proposal_tells_it() -> None:
    world = GroupWorld(topics(foo=6))
    members = stable_classic(world, 22, A="foo-0 foo-1", B="foo-3 foo-4", C="foo-2 foo-5")
    a, b, c = (members[name].name for name in "ABC")
    names = {a: "A", b: "B", c: "C"}

    def group_is(expected: str) -> None:
        world.check()
        text = world.show()
        for name, letter in names.items():
            text = text.replace(name, letter)
        assert text == dedent(expected).strip("\n")

    assert isinstance(world.coordinator.groups[GROUP], ClassicGroup)

    # A speaks the new protocol. The group is converted; everyone has what it had, at the generation as epoch.
    answer = world.join(a)
    assert (answer.member_epoch, world.told(answer)) == (22, "foo-0 foo-1")
    group_is(
        """
        Group (epoch=22) A B C
        Target (epoch=22)
          A [foo-0 foo-1]
          B [foo-3 foo-4]
          C [foo-2 foo-5]
        Members
          A epoch=22 [foo-0 foo-1]
          B epoch=22 [foo-3 foo-4]
          C epoch=22 [foo-2 foo-5]
        """
    )
    assert members["B"].beat() is ErrorCode.NONE

    # B leaves. The others are to have what it had, and C is called to a rebalance.
    assert world.leave_classic(b) is ErrorCode.NONE
    group_is(
        """
        Group (epoch=23) A C
        Target (epoch=23)
          A [foo-0 foo-1 foo-3]
          C [foo-2 foo-4 foo-5]
        Members
          A epoch=22 [foo-0 foo-1] pending [foo-3]
          C epoch=22 [foo-2 foo-5] pending [foo-4]
        """
    )
    assert members["C"].beat() is ErrorCode.REBALANCE_IN_PROGRESS

    # C, which is eager, has revoked everything and joins: it is at the next epoch at once, and syncs.
    assert members["C"].join().generation_id == 23
    assert world.told(world.beat(a, 22)) == "foo-0 foo-1 foo-3"
    assert members["C"].sync() == "foo-2 foo-4 foo-5"
    assert members["C"].beat() is ErrorCode.NONE

    # B is back with the new protocol. A and C are told to let go of a partition each; which one is
    # the assignor's choice (the proposal's gives back what came last, ours the last of a topic).
    answer = world.join(b)
    assert (answer.member_epoch, world.told(answer)) == (24, "")
    group_is(
        """
        Group (epoch=24) A B C
        Target (epoch=24)
          A [foo-0 foo-1]
          B [foo-3 foo-5]
          C [foo-2 foo-4]
        Members
          A epoch=23 [foo-0 foo-1 foo-3]
          B epoch=24 [] pending [foo-3 foo-5]
          C epoch=23 [foo-2 foo-4 foo-5]
        """
    )
    assert world.told(world.beat(a, 23)) == "foo-0 foo-1"
    assert members["C"].beat() is ErrorCode.REBALANCE_IN_PROGRESS
    assert members["C"].join().generation_id == 24
    assert world.told(world.beat(b, 24)) == "foo-5"
    assert members["C"].sync() == "foo-2 foo-4"
    assert world.beat(a, 23, "foo-0 foo-1").member_epoch == 24
    assert world.told(world.beat(b, 24, "foo-5")) == "foo-3 foo-5"
    group_is(
        """
        Group (epoch=24) A B C
        Target (epoch=24)
          A [foo-0 foo-1]
          B [foo-3 foo-5]
          C [foo-2 foo-4]
        Members
          A epoch=24 [foo-0 foo-1]
          B epoch=24 [foo-3 foo-5]
          C epoch=24 [foo-2 foo-4]
        """
    )


def test_a_cooperative_member_revokes_between_two_joins() -> None:
    world = GroupWorld(topics(foo=3))
    members = stable_classic(world, 1, "cooperative-sticky", A="foo-0 foo-1 foo-2")
    member = members["A"]
    assert world.told(world.join("N")) == ""
    assert member.beat() is ErrorCode.REBALANCE_IN_PROGRESS
    assert member.join().generation_id == 1
    assert member.sync() == "foo-0 foo-1"
    assert world.told(world.beat("N", 2)) is None
    assert member.join().generation_id == 2
    assert member.sync() == "foo-0 foo-1"
    assert world.told(world.beat("N", 2)) == "foo-2"
    assert member.beat() is ErrorCode.NONE


def test_when_the_last_member_of_the_new_protocol_leaves_the_group_is_a_classic_one_again() -> None:
    world = GroupWorld(topics(foo=2))
    members = stable_classic(world, 3, A="foo-0", B="foo-1")
    world.join("N")
    group = world.coordinator.groups[GROUP]
    assert isinstance(group, ConsumerGroup)
    epoch = group.epoch
    world.leave("N")
    group = world.coordinator.groups[GROUP]
    assert isinstance(group, ClassicGroup)
    assert (group.generation, sorted(group.members)) == (epoch, sorted(member.name for member in members.values()))
    assert members["A"].beat() is ErrorCode.ILLEGAL_GENERATION
    world.check()
    replayed = world.replayed().groups[GROUP]
    assert isinstance(replayed, ClassicGroup)
    assert replayed.generation == epoch
    # Nothing of the other protocol is left in the log: what a compacted log says is the classic group alone.
    assert {kind for kind, value in _last_kinds(world).items() if value} == {2}


def _last_kinds(world: GroupWorld) -> dict[int, bool]:
    last: dict[bytes, bool] = {}
    for key, value, _ in world.log:
        last[key] = value is not None
    kinds: dict[int, bool] = {}
    for key, present in last.items():
        kind = int.from_bytes(key[:2])
        kinds[kind] = kinds.get(kind, False) or present
    return kinds


def test_a_group_that_cannot_move_says_why() -> None:
    world = GroupWorld(topics(foo=1))
    answer = world.join_classic("", {"x": b"?"}, version=3, protocol_type="connect")
    assert not isinstance(answer, JoinGroupResponse)
    refused = world.beat("N", 0, "", topics=["foo"], rebalance_timeout_ms=1)
    assert refused.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert "protocol type is 'connect'" in (refused.error_message or "")


def test_a_static_member_comes_back_under_the_other_protocol_while_its_session_lasts() -> None:
    """It leaves no group when it ends, as a static member of the classic protocol must not."""
    world = GroupWorld(topics(foo=2))
    ticket = world.join_classic("", {"range": subscription("foo")}, instance="i", session_timeout_ms=1_800_000)
    world.advance(3 * world.settings.initial_rebalance_delay_ms)
    joined = ticket if isinstance(ticket, JoinGroupResponse) else world.answers[ticket]
    given = [SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment("foo-0 foo-1"))]
    world.sync_classic(joined.member_id, joined.generation_id, given)
    answer = world.join("N", instance_id="i")
    assert world.named(world.group.members["N"].assigned) == "foo-0 foo-1" and list(world.group.members) == ["N"]
    request = HeartbeatRequest(
        group_id=GROUP, generation_id=joined.generation_id, member_id=joined.member_id, group_instance_id="i"
    )
    late = world.submit(lambda machine: machine.heartbeat(request, Caller(version=4), world.now_ms))
    assert late.error_code == ErrorCode.FENCED_INSTANCE_ID
    commit = OffsetCommitRequest(
        group_id=GROUP,
        generation_id_or_member_epoch=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id="i",
        topics=[
            OffsetCommitRequestTopic(
                name="foo", partitions=[OffsetCommitRequestPartition(partition_index=0, committed_offset=1)]
            )
        ],
    )
    late = world.submit(lambda machine: machine.offset_commit(commit, Caller(version=9), world.now_ms))
    assert late.topics[0].partitions[0].error_code == ErrorCode.FENCED_INSTANCE_ID
    refused = world.beat("M", 0, "", topics=["foo"], rebalance_timeout_ms=1, instance_id="i")
    assert refused.error_code == ErrorCode.UNRELEASED_INSTANCE_ID, "members of the new protocol say when they leave"
    world.advance(40_000)
    assert world.beat("N", answer.member_epoch).error_code == ErrorCode.NONE
    world.check()


def test_a_static_member_that_comes_back_has_no_topics_of_a_generation_before() -> None:
    """It joined again with fewer topics, and the rebalance was not over."""
    world = GroupWorld(topics(foo=1, bar=1))
    both = {"range": subscription("foo", "bar")}
    ticket = world.join_classic("", both, instance="i", session_timeout_ms=1_800_000)
    world.advance(3 * world.settings.initial_rebalance_delay_ms)
    joined = ticket if isinstance(ticket, JoinGroupResponse) else world.answers[ticket]
    given = [SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment("foo-0 bar-0"))]
    world.sync_classic(joined.member_id, joined.generation_id, given)
    world.join_classic("", EAGER, instance="i", session_timeout_ms=1_800_000)
    world.join("N", instance_id="i")
    assert world.named(world.group.members["N"].assigned) == "foo-0"
    world.check()


def test_the_policy_may_forbid_to_move() -> None:
    world = GroupWorld(topics(foo=1), GroupSettings(consumer_migration_policy="downgrade"))
    stable_classic(world, 1, A="foo-0")
    refused = world.beat("N", 0, "", topics=["foo"], rebalance_timeout_ms=1)
    assert refused.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert "group.consumer.migration.policy is downgrade" in (refused.error_message or "")


def test_a_classic_member_that_does_not_rejoin_in_time_is_removed() -> None:
    world = GroupWorld(topics(foo=2))
    members = stable_classic(world, 1, A="foo-0 foo-1")
    world.join("N")
    for _ in range(12):
        if members["A"].beat() is ErrorCode.UNKNOWN_MEMBER_ID:
            break
        world.beat("N", 2)
        world.advance(5_000)
    world.advance(1)
    assert sorted(world.group.members) == ["N"]
    assert world.told(world.beat("N", 2)) == "foo-0 foo-1"


def test_an_empty_group_of_either_protocol_becomes_one_of_the_other() -> None:
    world = GroupWorld(topics(foo=1))
    world.join("N")
    world.leave("N")
    epoch = world.group.epoch
    stable_classic(world, 1, A="foo-0")
    group = world.coordinator.groups[GROUP]
    assert isinstance(group, ClassicGroup)
    assert group.generation > epoch
    assert world.leave_classic(next(iter(group.members))) is ErrorCode.NONE
    answer = world.join("N")
    assert answer.member_epoch > group.generation
    world.check()


def test_a_new_coordinator_knows_the_classic_members_of_a_group_that_is_moving() -> None:
    world = GroupWorld(topics(foo=6))
    members = stable_classic(world, 2, A="foo-0 foo-1 foo-2", B="foo-3 foo-4 foo-5")
    world.join("N")
    world.reload(compact=True)
    member = members["A"]
    assert member.beat() is ErrorCode.REBALANCE_IN_PROGRESS
    assert member.join().generation_id == 3
    assert member.sync() == "foo-0 foo-1"
    assert members["B"].beat() is ErrorCode.REBALANCE_IN_PROGRESS
    members["B"].join()
    members["B"].sync()
    assert world.told(world.beat("N", 3)) == "foo-2 foo-5"


def test_what_a_member_has_yet_to_let_go_of_when_the_group_moves_is_given_to_nobody() -> None:
    world = GroupWorld(topics(foo=2))
    members = stable_classic(world, 1, "cooperative-sticky", A="foo-0 foo-1", B="")
    rebalance(world, members, {"A": "foo-0", "B": ""})
    assert world.told(world.join("N")) == ""  # foo-1 is nobody's by the leader's assignment, and A still reads it
    assert world.told(world.beat("N", 3)) is None
    member = members["A"]
    assert member.beat() is ErrorCode.REBALANCE_IN_PROGRESS
    member.owned = "foo-0"
    assert member.join().generation_id == 3
    assert member.sync() == "foo-0"
    holder = world.group.holders[next(iter(world.image.by_id)), 0]
    assert holder == member.name
    world.beat("N", 3, "")
    world.check()


@pytest.mark.parametrize("later", ["A", "B"])
def test_of_two_that_say_they_own_a_partition_the_one_of_the_later_generation_has_it(later: str) -> None:
    world = GroupWorld(topics(foo=2))
    members = stable_classic(world, 2, "cooperative-sticky", A="foo-0 foo-1", B="")
    for name, member in members.items():
        member.owned, member.generation = "foo-1", 2 if name == later else 1
    rebalance(world, members, {"A": "foo-0", "B": ""})
    assert world.told(world.join("N")) == ""
    assert world.group.holders[next(iter(world.image.by_id)), 1] == members[later].name
    world.check()


def test_who_has_yet_to_let_go_when_the_group_moves_is_removed_if_it_never_does() -> None:
    world = GroupWorld(topics(foo=2))
    owns = {"cooperative-sticky": subscription("foo", owned="foo-0 foo-1", generation=1)}
    members = stable_classic(world, 1, "cooperative-sticky", A="foo-0")
    world.join_classic(members["A"].name, owns)
    world.sync_classic(
        members["A"].name, 2, [SyncGroupRequestAssignment(member_id=members["A"].name, assignment=assignment("foo-0"))]
    )
    world.join("N")
    for _ in range(13):
        world.beat_classic(members["A"].name, 2)
        world.beat("N", 3)
        world.advance(5_000)
    assert sorted(world.group.members) == ["N"]


def test_members_that_could_not_be_a_classic_group_are_not_let_in() -> None:
    world = GroupWorld(topics(foo=2))
    world.join("N")
    first = world.join_classic("", EAGER, version=3)
    assert isinstance(first, JoinGroupResponse)
    assert first.error_code == ErrorCode.NONE
    other = world.join_classic("", {"cooperative-sticky": subscription("foo")}, version=3, fresh="other")
    assert isinstance(other, JoinGroupResponse)
    assert other.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    both = {"cooperative-sticky": subscription("foo"), **EAGER}
    third = world.join_classic("", both, version=3, fresh="third")
    assert isinstance(third, JoinGroupResponse)
    assert third.error_code == ErrorCode.NONE
    world.leave("N")
    assert isinstance(world.coordinator.groups[GROUP], ClassicGroup)


def test_who_owns_what_it_does_not_hold_was_left_behind_and_learns_that_it_has_lost_all() -> None:
    world = GroupWorld(topics(foo=2))
    member = stable_classic(world, 1, "cooperative-sticky", A="foo-0")["A"]
    world.join("N")
    member.owned = "foo-0 foo-1"
    answer = world.join_classic(member.name, member.protocols())
    assert isinstance(answer, JoinGroupResponse)
    assert answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    member.owned = "foo-0"
    member.join()
    assert member.sync() == "foo-0"
    world.check()


def test_who_comes_back_after_it_was_removed_learns_that_it_has_lost_all() -> None:
    world = GroupWorld(topics(foo=2))
    members = stable_classic(world, 1, "cooperative-sticky", A="foo-0 foo-1")
    world.join("N")
    assert world.leave_classic(members["A"].name) is ErrorCode.NONE
    answer = world.join_classic(members["A"].name, members["A"].protocols())
    assert isinstance(answer, JoinGroupResponse)
    assert answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_join_that_comes_late_on_an_older_connection_does_not_speak_for_the_member() -> None:
    world = GroupWorld(topics(foo=2))
    members = stable_classic(world, 1, A="foo-0 foo-1")
    member = members["A"]
    world.join("N")
    answer = world.join_classic(member.name, EAGER, connection=2)
    assert isinstance(answer, JoinGroupResponse)
    member.generation = answer.generation_id
    assert member.sync() == "foo-0"
    world.join("M", topics=["foo"])
    late = world.join_classic(member.name, EAGER, connection=1)  # it had let go of everything when it sent this
    assert isinstance(late, JoinGroupResponse)
    assert late.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert world.group.members[member.name].epoch == member.generation


def test_a_new_coordinator_lets_a_group_that_has_just_become_classic_again_rebalance() -> None:
    world = GroupWorld(topics(foo=2))
    members = stable_classic(world, 1, "cooperative-sticky", A="foo-0 foo-1")
    world.join("N")
    member = members["A"]
    assert member.beat() is ErrorCode.REBALANCE_IN_PROGRESS
    member.join()
    member.owned = member.sync()
    member.join()
    world.leave("N")
    world.reload()
    assert isinstance(world.coordinator.groups[GROUP], ClassicGroup)
    assert member.beat() is ErrorCode.REBALANCE_IN_PROGRESS  # what N had must find a new owner
