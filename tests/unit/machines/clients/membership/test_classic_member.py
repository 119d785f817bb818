"""The member by the classic protocol, as transcripts."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.connection import DisconnectedError
from anabranch.machines.clients.membership.classic import LOOK_UNFETCHED_MS, ClassicMember, Phase
from anabranch.machines.clients.membership.steps import (
    Assign,
    Event,
    Failed,
    Lost,
    MemberSettings,
    Owned,
    Revoke,
    Send,
    Subscription,
    TopicFacts,
    WaitUntil,
)
from anabranch.machines.clients.membership.strategies import (
    assignment_bytes,
    assignment_of,
    subscriber_of,
    subscription_bytes,
)
from anabranch.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse, JoinGroupResponseMember
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

INTERVAL = 3_000
COOPERATIVE = ("cooperative-sticky",)


def owned(*numbers: int) -> frozenset[Owned]:
    return frozenset(Owned("flights", number) for number in numbers)


class World:
    """A member, a clock, and somebody who plays coordinator and application."""

    def __init__(self, *strategies: str, **settings: Any) -> None:
        self.now = 1_000
        self.member = ClassicMember(
            MemberSettings("g", **{"max_poll_interval_ms": 60_000, **settings}),
            strategies=strategies or ("range",),
            session_timeout_ms=45_000,
            heartbeat_interval_ms=INTERVAL,
            metadata_max_age_ms=300_000,
        )
        self.member.subscribe(Subscription(frozenset({"flights"})))

    def sends(self, kind: type[Any]) -> Any:
        step = self.member.next(self.now)
        assert isinstance(step, Send), step
        assert isinstance(step.request, kind), step.request
        assert isinstance(self.member.next(self.now), WaitUntil)
        self.ticket = step.ticket
        return step.request

    def quiet(self) -> int | None:
        step = self.member.next(self.now)
        assert isinstance(step, WaitUntil), step
        return step.at_ms

    def hears(self, response: Any) -> None:
        self.member.on_response(self.ticket, response, self.now)

    def carry_out(self, expected: Event) -> None:
        event = self.member.take()
        assert event == expected
        assert event is not None
        self.member.done(event, self.now)

    def joins(self, generation: int, *, leader: bool = False, members: Any = (), **fields: Any) -> JoinGroupRequest:
        request: JoinGroupRequest = self.sends(JoinGroupRequest)
        self.hears(
            JoinGroupResponse(
                generation_id=generation,
                protocol_name=request.protocols[0].name,
                leader="m1" if leader else "other",
                member_id="m1",
                members=list(members),
                **fields,
            )
        )
        return request

    def syncs(self, *numbers: int) -> SyncGroupRequest:
        request: SyncGroupRequest = self.sends(SyncGroupRequest)
        given = assignment_bytes([TopicPartition("flights", number) for number in numbers])
        self.hears(SyncGroupResponse(assignment=given))
        return request

    def beats(self, code: ErrorCode = ErrorCode.NONE) -> HeartbeatRequest:
        self.now += INTERVAL
        request: HeartbeatRequest = self.sends(HeartbeatRequest)
        self.hears(HeartbeatResponse(error_code=int(code)))
        return request

    def stable(self, *numbers: int) -> World:
        self.joins(1)
        self.syncs(*numbers)
        self.carry_out(Assign(owned(*numbers)))
        return self


def test_it_joins_with_the_id_that_it_is_given_syncs_and_beats() -> None:
    world = World("range", "roundrobin")
    first = world.sends(JoinGroupRequest)
    assert (first.member_id, first.rebalance_timeout_ms, first.session_timeout_ms) == ("", 60_000, 45_000)
    assert [protocol.name for protocol in first.protocols] == ["range", "roundrobin"]
    world.hears(JoinGroupResponse(error_code=int(ErrorCode.MEMBER_ID_REQUIRED), member_id="m1"))
    assert world.joins(3).member_id == "m1"
    sync = world.syncs(0, 1)
    assert (sync.generation_id, sync.protocol_name, sync.assignments) == (3, "range", [])
    world.carry_out(Assign(owned(0, 1)))
    assert world.quiet() == world.now + INTERVAL
    beat = world.beats()
    assert (beat.generation_id, beat.member_id) == (3, "m1")


def test_the_leader_hears_how_many_partitions_there_are_and_assigns() -> None:
    world = World()
    said = subscription_bytes("range", frozenset({"flights"}), frozenset(), -1, None)
    world.joins(1, leader=True, members=[JoinGroupResponseMember(member_id=m, metadata=said) for m in ("m1", "m2")])
    assert world.member.wanted_topics == {"flights"}
    assert world.quiet() == world.now + INTERVAL
    world.beats()
    world.member.on_topics([TopicFacts("flights", Owned("", 0).topic_id, 3)])
    sync = world.syncs(0, 1)
    given = {one.member_id: sorted(tp.partition for tp in assignment_of(one.assignment)) for one in sync.assignments}
    assert given == {"m1": [0, 1], "m2": [2]}
    world.carry_out(Assign(owned(0, 1)))
    world.now += 300_000
    world.beats()
    assert world.member.wanted_topics == {"flights"}
    world.member.on_topics([TopicFacts("flights", Owned("", 0).topic_id, 3)])
    assert world.member.phase is Phase.STABLE
    world.now += 300_000
    world.beats()
    world.member.on_topics([TopicFacts("flights", Owned("", 0).topic_id, 5)])
    world.carry_out(Revoke(owned(0, 1)))
    world.sends(JoinGroupRequest)


def test_the_leader_assigns_again_when_partitions_begin_to_retire_and_balances_them_apart() -> None:
    world = World()
    said = subscription_bytes("range", frozenset({"flights"}), frozenset(), -1, None)
    both = [JoinGroupResponseMember(member_id=m, metadata=said) for m in ("m1", "m2")]

    def assigned(facts: TopicFacts) -> dict[str, list[int]]:
        world.member.on_topics([facts])
        given = world.syncs(0).assignments
        return {one.member_id: sorted(tp.partition for tp in assignment_of(one.assignment)) for one in given}

    world.joins(1, leader=True, members=both)
    assert assigned(TopicFacts("flights", NO_TOPIC_ID, 4)) == {"m1": [0, 1], "m2": [2, 3]}
    world.carry_out(Assign(owned(0)))
    world.now += 300_000
    world.beats()
    world.member.on_topics([TopicFacts("flights", NO_TOPIC_ID, 4, retiring_count=2)])
    world.carry_out(Revoke(owned(0)))
    world.joins(2, leader=True, members=both)
    assert assigned(TopicFacts("flights", NO_TOPIC_ID, 4, retiring_count=2)) == {"m1": [0, 2], "m2": [1, 3]}


def test_an_eager_member_lets_go_of_all_before_it_joins_and_beats_until_then() -> None:
    world = World().stable(0, 1)
    world.beats(ErrorCode.REBALANCE_IN_PROGRESS)
    assert world.member.event() == Revoke(owned(0, 1))
    world.beats(ErrorCode.REBALANCE_IN_PROGRESS)
    world.carry_out(Revoke(owned(0, 1)))
    world.joins(2)
    world.syncs(1)
    world.carry_out(Assign(owned(1)))


def test_a_cooperative_member_keeps_what_it_has_lets_go_of_what_is_taken_and_joins_again() -> None:
    world = World(*COOPERATIVE).stable(0, 1)
    world.beats(ErrorCode.REBALANCE_IN_PROGRESS)
    assert world.member.event() is None
    said = world.joins(2).protocols[0].metadata
    subscriber = subscriber_of("m1", None, "cooperative-sticky", said)
    assert {tp.partition for tp in subscriber.owned} == {0, 1} and subscriber.generation == 1
    world.syncs(0)
    world.carry_out(Revoke(owned(1)))
    said = world.joins(3).protocols[0].metadata
    assert {tp.partition for tp in subscriber_of("m1", None, "cooperative-sticky", said).owned} == {0}
    world.syncs(0, 5)
    world.carry_out(Assign(owned(5)))
    world.beats()


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION])
@pytest.mark.parametrize("strategies", [("range",), COOPERATIVE])
def test_who_is_not_known_has_lost_all_and_begins_anew(code: ErrorCode, strategies: tuple[str, ...]) -> None:
    world = World(*strategies).stable(0, 1)
    world.beats(code)
    assert not world.member.is_member and world.quiet() is not None
    world.carry_out(Lost(owned(0, 1)))
    world.now += 100
    request = world.sends(JoinGroupRequest)
    assert request.member_id == ""
    assert not subscriber_of("m", None, strategies[0], request.protocols[0].metadata).owned


def test_a_static_member_that_a_generation_went_on_without_has_lost_what_it_had_of_the_one_before() -> None:
    world = World(*COOPERATIVE, group_instance_id="i1").stable(0, 1)
    world.beats(ErrorCode.REBALANCE_IN_PROGRESS)
    world.joins(3)
    assert not world.member.is_member and world.quiet() is None
    world.carry_out(Lost(owned(0, 1)))
    request = world.joins(4)
    assert request.member_id == "m1"
    assert not subscriber_of("m1", None, "cooperative-sticky", request.protocols[0].metadata).owned
    world.syncs(1)
    world.carry_out(Assign(owned(1)))


@pytest.mark.parametrize(
    ("code", "joins_as"), [(ErrorCode.ILLEGAL_GENERATION, "m1"), (ErrorCode.UNKNOWN_MEMBER_ID, "")]
)
@pytest.mark.parametrize("strategies", [("range",), COOPERATIVE])
def test_a_commit_that_is_refused_tells_that_all_is_lost(
    code: ErrorCode, joins_as: str, strategies: tuple[str, ...]
) -> None:
    world = World(*strategies).stable(0, 1)
    world.member.commit_refused(code, 0, world.now)
    world.member.commit_refused(ErrorCode.REBALANCE_IN_PROGRESS, 1, world.now)
    assert world.member.is_member and world.member.event() is None
    world.member.commit_refused(code, 1, world.now)
    assert not world.member.is_member
    world.carry_out(Lost(owned(0, 1)))
    world.now += 100
    request = world.sends(JoinGroupRequest)
    assert request.member_id == joins_as
    assert not subscriber_of("m", None, strategies[0], request.protocols[0].metadata).owned


def test_a_commit_that_is_refused_while_a_join_is_under_way_tells_nothing() -> None:
    world = World(*COOPERATIVE).stable(0, 1)
    world.beats(ErrorCode.REBALANCE_IN_PROGRESS)
    world.sends(JoinGroupRequest)
    world.member.commit_refused(ErrorCode.ILLEGAL_GENERATION, 1, world.now)
    assert world.member.is_member and world.member.event() is None
    assert world.member.owned == owned(0, 1)


def test_a_sync_that_a_new_rebalance_overtook_joins_again() -> None:
    world = World()
    world.joins(1)
    world.sends(SyncGroupRequest)
    world.hears(SyncGroupResponse(error_code=int(ErrorCode.REBALANCE_IN_PROGRESS)))
    world.joins(2)
    world.syncs(0)
    world.carry_out(Assign(owned(0)))


def test_requests_without_an_answer_are_tried_again_later() -> None:
    world = World()
    world.sends(JoinGroupRequest)
    world.member.on_error(world.ticket, DisconnectedError("gone"), world.now)
    assert world.quiet() == world.now + 100
    world.now += 100
    world.joins(1)
    world.sends(SyncGroupRequest)
    world.member.on_error(world.ticket, DisconnectedError("gone"), world.now)
    world.now += 100
    world.joins(1)
    world.syncs(0)
    world.carry_out(Assign(owned(0)))
    world.beats(ErrorCode.NOT_COORDINATOR)
    assert world.quiet() == world.now + 100
    assert world.member.owned == owned(0)


@pytest.mark.parametrize(("instance_id", "stay", "says"), [(None, None, True), ("i", None, False), ("i", False, True)])
def test_it_leaves_when_the_application_has_let_go(instance_id: str | None, stay: bool | None, says: bool) -> None:
    world = World(group_instance_id=instance_id).stable(0)
    world.member.leave(stay=stay)
    assert world.quiet() is None
    world.carry_out(Revoke(owned(0)))
    if says:
        [member] = world.sends(LeaveGroupRequest).members
        assert (member.member_id, member.group_instance_id) == ("m1", instance_id)
        world.hears(LeaveGroupResponse())
    assert world.member.has_left


def test_a_leaving_member_ignores_the_assignment_that_was_on_its_way_and_revokes_what_it_had() -> None:
    world = World(*COOPERATIVE).stable(0, 1)
    world.beats(ErrorCode.REBALANCE_IN_PROGRESS)
    world.joins(2)
    world.sends(SyncGroupRequest)
    world.member.leave()
    world.hears(SyncGroupResponse(assignment=assignment_bytes([TopicPartition("flights", 2)])))
    assert world.member.owned == owned(0, 1)
    world.carry_out(Revoke(owned(0, 1)))
    world.sends(LeaveGroupRequest)
    world.hears(LeaveGroupResponse())
    assert world.member.has_left


def test_a_cooperative_member_joins_once_more_only_when_the_application_has_revoked() -> None:
    world = World(*COOPERATIVE).stable(0, 1)
    world.beats(ErrorCode.REBALANCE_IN_PROGRESS)
    world.joins(2)
    world.syncs(1)
    event = world.member.take()
    assert event == Revoke(owned(0))
    world.now += INTERVAL
    world.sends(HeartbeatRequest)  # The application takes its time: the member stays in its generation.
    world.hears(HeartbeatResponse())
    assert event is not None
    world.member.done(event, world.now)
    assert world.member.owned == owned(1)
    world.joins(3)


def test_who_does_not_poll_leaves_and_learns_at_the_next_poll_what_it_lost() -> None:
    world = World().stable(0)
    world.member.poll_ended(world.now)
    for _ in range(19):
        world.beats()
    world.now += INTERVAL
    world.sends(LeaveGroupRequest)
    world.hears(LeaveGroupResponse())
    world.now += 60_000
    assert world.quiet() is None
    world.member.poll_began(world.now)
    world.carry_out(Lost(owned(0)))
    assert world.sends(JoinGroupRequest).member_id == ""


def test_who_has_slices_learns_that_they_are_lost_though_nothing_is_assigned() -> None:
    world = World(share="any")
    world.joins(1)
    world.syncs()
    world.beats(ErrorCode.UNKNOWN_MEMBER_ID)
    world.now += INTERVAL
    assert world.quiet() is None, "not before the application has dropped them"
    world.carry_out(Lost(owned()))
    world.joins(2)
    world.syncs()
    world.member.poll_ended(world.now)
    world.now += 60_000
    world.sends(LeaveGroupRequest)
    world.hears(LeaveGroupResponse())
    world.member.poll_began(world.now)
    world.carry_out(Lost(owned()))
    world.joins(3)


def test_a_changed_subscription_joins_again() -> None:
    world = World(*COOPERATIVE).stable(0)
    world.member.subscribe(Subscription(frozenset({"airports", "flights"})))
    said = world.joins(2).protocols[0].metadata
    assert subscriber_of("m1", None, "cooperative-sticky", said).topics == {"airports", "flights"}


@pytest.mark.parametrize("code", [ErrorCode.INCONSISTENT_GROUP_PROTOCOL, ErrorCode.FENCED_INSTANCE_ID])
def test_who_is_refused_says_why(code: ErrorCode) -> None:
    world = World()
    world.sends(JoinGroupRequest)
    world.hears(JoinGroupResponse(error_code=int(code)))
    event = world.member.event()
    assert isinstance(event, Failed) and event.error.code is code
    assert world.quiet() is None


def test_members_that_make_no_sense_do_not_crash_the_leader() -> None:
    world = World()
    world.joins(1, leader=True, members=[JoinGroupResponseMember(member_id="m2", metadata=b"\x00")])
    assert isinstance(world.member.event(), Failed)


def test_a_leader_that_is_to_look_at_topics_does_not_spin_while_it_waits_for_an_answer() -> None:
    world = World()
    said = subscription_bytes("range", frozenset({"flights"}), frozenset(), -1, None)
    world.joins(1, leader=True, members=[JoinGroupResponseMember(member_id="m1", metadata=said)])
    world.member.on_topics([TopicFacts("flights", Owned("", 0).topic_id, 1)])
    world.syncs(0)
    world.now += INTERVAL
    world.sends(HeartbeatRequest)
    world.now += 300_000
    due = world.quiet()
    assert due is None or due > world.now
    assert world.member.wanted_topics == {"flights"}


def test_a_leader_whose_fetches_show_another_layout_looks_at_its_topics_at_once() -> None:
    """It learned of new partitions with its metadata only: after five minutes."""
    world = World()
    said = subscription_bytes("range", frozenset({"flights"}), frozenset(), -1, None)
    world.joins(1, leader=True, members=[JoinGroupResponseMember(member_id="m1", metadata=said)])
    world.member.on_topics([TopicFacts("flights", NO_TOPIC_ID, 1)])
    world.syncs(0)
    world.carry_out(Assign(owned(0)))
    world.quiet()
    assert not world.member.wanted_topics
    world.member.layout_changed()
    world.quiet()
    assert world.member.wanted_topics == {"flights"}
    world.member.on_topics([TopicFacts("flights", NO_TOPIC_ID, 2)])
    world.carry_out(Revoke(owned(0)))
    world.sends(JoinGroupRequest)


def leading(*topics: str) -> World:
    """A leader that owns partition 0 of flights, in a group that subscribes to these topics."""
    world = World()
    said = subscription_bytes("range", frozenset(topics), frozenset(), -1, None)
    world.joins(1, leader=True, members=[JoinGroupResponseMember(member_id="m1", metadata=said)])
    world.member.on_topics([TopicFacts(topic, NO_TOPIC_ID, 1) for topic in topics])
    world.syncs(0)
    world.carry_out(Assign(owned(0)))
    return world


def test_a_leader_asks_soon_after_topics_that_it_does_not_fetch() -> None:
    """No refused fetch tells it of a resize, and its metadata may be five minutes old."""
    world = leading("flights", "ships")
    for _ in range(2):
        world.now += LOOK_UNFETCHED_MS - 1
        world.beats()
        world.now += 1
        world.quiet()
        assert world.member.wanted_topics == {"flights", "ships"}
        world.member.on_topics([TopicFacts(topic, NO_TOPIC_ID, 1) for topic in ("flights", "ships")])
    world.now += LOOK_UNFETCHED_MS
    world.beats()
    world.member.on_topics([TopicFacts("ships", NO_TOPIC_ID, 2)])
    world.member.on_topics([TopicFacts("flights", NO_TOPIC_ID, 1)])
    world.carry_out(Revoke(owned(0)))
    world.sends(JoinGroupRequest)


def test_a_leader_that_fetches_all_topics_asks_when_its_metadata_is_old() -> None:
    world = leading("flights")
    world.now += 300_000 - INTERVAL - 1
    world.beats()
    assert not world.member.wanted_topics
    world.now += 1
    world.quiet()
    assert world.member.wanted_topics == {"flights"}


def test_a_member_that_does_not_lead_looks_at_no_topics_when_its_fetches_show_another_layout() -> None:
    world = World()
    world.joins(1)
    world.syncs(0)
    world.member.layout_changed()
    world.quiet()
    assert not world.member.wanted_topics


@pytest.mark.parametrize(("count", "rejoins"), [(2, False), (1, True)])
def test_a_leader_that_took_over_its_former_selfs_assignment_watches_the_topics(count: int, rejoins: bool) -> None:
    world = World(group_instance_id="i1")
    said = subscription_bytes("range", frozenset({"flights", "ships"}), frozenset(), -1, None)
    world.joins(4, leader=True, skip_assignment=True, members=[JoinGroupResponseMember(member_id="m1", metadata=said)])
    assert world.syncs(0, 1).assignments == []
    assert world.member.wanted_topics == {"flights", "ships"}
    world.member.on_topics([TopicFacts("flights", NO_TOPIC_ID, count), TopicFacts("ships", NO_TOPIC_ID, 1)])
    world.carry_out(Assign(owned(0, 1)))
    if rejoins:  # what it was given is not there any more
        world.carry_out(Revoke(owned(0, 1)))
        world.sends(JoinGroupRequest)
        return
    world.now += 300_000
    world.beats()
    assert world.member.wanted_topics == {"flights", "ships"}
    world.member.on_topics([TopicFacts("flights", NO_TOPIC_ID, 2), TopicFacts("ships", NO_TOPIC_ID, 2)])
    world.carry_out(Revoke(owned(0, 1)))
    world.sends(JoinGroupRequest)


def test_what_is_lost_while_the_application_takes_it_is_lost_as_soon_as_it_has_it() -> None:
    world = World("cooperative-sticky")
    world.joins(1)
    world.syncs(0, 1)
    taking = world.member.take()
    assert taking == Assign(owned(0, 1))
    world.beats(ErrorCode.UNKNOWN_MEMBER_ID)
    world.member.done(taking, world.now)
    assert world.quiet() is None or not world.member.has_left
    world.carry_out(Lost(owned(0, 1)))
    world.now += INTERVAL
    assert world.joins(2).member_id == ""
