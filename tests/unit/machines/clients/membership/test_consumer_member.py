"""The member by the consumer protocol, as transcripts: what it sends, what it tells the application, when."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.cluster.connection import DisconnectedError
from anabranch.machines.clients.membership.assignors import (
    ASSIGNMENT_ERROR,
    AssignmentSpec,
    AssignorMetadata,
    GroupAssignment,
    MemberAssignment,
    PartitionAssignor,
    TopicIdPartition,
)
from anabranch.machines.clients.membership.consumer import ConsumerMember, Phase
from anabranch.machines.clients.membership.steps import (
    Assign,
    Compute,
    Event,
    Explain,
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
from anabranch.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from anabranch.protocol.messages.consumer_group_install_assignment import (
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
)
from anabranch.protocol.messages.consumer_group_prepare_assignment import (
    Assignor,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
    Member,
    TopicMetadata,
)

FLIGHTS, AIRPORTS = UUID(int=1), UUID(int=2)
NAMES = {FLIGHTS: "flights", AIRPORTS: "airports"}
INTERVAL = 5_000


def owned(*numbers: int, topic_id: UUID = FLIGHTS) -> frozenset[Owned]:
    return frozenset(Owned(NAMES[topic_id], number, topic_id) for number in numbers)


class World:
    """A member, a clock, and somebody who plays coordinator and application."""

    def __init__(self, *, named: bool = True, **settings: Any) -> None:
        assignors = settings.pop("local_assignors", ())
        server_assignor = settings.pop("server_assignor", None)
        self.now = 1_000
        self.member = ConsumerMember(
            MemberSettings("g", **{"max_poll_interval_ms": 60_000, **settings}),
            "m1",
            server_assignor=server_assignor,
            local_assignors=assignors,
        )
        if named:
            self.member.on_topics([TopicFacts("flights", FLIGHTS, 6)])
        self.member.subscribe(Subscription(frozenset({"flights"})))

    def sent(self) -> tuple[int, Any]:
        step = self.member.next(self.now)
        assert isinstance(step, Send), step
        return step.ticket, step.request

    def beat(self) -> ConsumerGroupHeartbeatRequest:
        """What is sent now; it is answered by `answer`."""
        self.ticket, request = self.sent()
        assert isinstance(request, ConsumerGroupHeartbeatRequest)
        following = self.member.next(self.now)
        assert not (isinstance(following, Send) and isinstance(following.request, ConsumerGroupHeartbeatRequest))
        return request

    def answer(
        self, epoch: int, *numbers: int, error: ErrorCode = ErrorCode.NONE, assigned: bool = True, **fields: Any
    ) -> None:
        topics = [TopicPartitions(topic_id=fields.pop("topic_id", FLIGHTS), partitions=list(numbers))]
        if error is not ErrorCode.NONE:
            assigned = False
        response = ConsumerGroupHeartbeatResponse(
            error_code=int(error),
            member_id="m1",
            member_epoch=epoch,
            heartbeat_interval_ms=INTERVAL,
            assignment=Assignment(topic_partitions=topics if numbers else []) if assigned else None,
            **fields,
        )
        self.member.on_response(self.ticket, response, self.now)

    def quiet(self) -> int | None:
        step = self.member.next(self.now)
        assert isinstance(step, WaitUntil), step
        return step.at_ms

    def carry_out(self, expected: Event) -> None:
        event = self.member.take()
        assert event == expected
        assert self.member.event() is None
        assert event is not None
        self.member.done(event, self.now)

    def joined(self, *numbers: int, epoch: int = 1) -> World:
        """A member that has what it was given, and has said so."""
        self.beat()
        self.answer(epoch, *numbers)
        if numbers:
            self.carry_out(Assign(owned(*numbers)))
        self.beat()
        self.answer(epoch, assigned=False)
        return self


def test_it_joins_with_all_there_is_to_say_and_then_says_what_changed() -> None:
    world = World(server_assignor="uniform", client_rack="r1")
    first = world.beat()
    assert (first.member_id, first.member_epoch, first.rebalance_timeout_ms) == ("m1", 0, 60_000)
    assert (first.subscribed_topic_names, first.server_assignor, first.rack_id) == (["flights"], "uniform", "r1")
    assert first.topic_partitions == [] and first.client_assignors is None
    world.answer(1, 0, 1)
    world.carry_out(Assign(owned(0, 1)))
    second = world.beat()
    assert second.topic_partitions == [TopicPartitions(topic_id=FLIGHTS, partitions=[0, 1])]
    assert (second.member_epoch, second.rebalance_timeout_ms, second.subscribed_topic_names) == (1, -1, None)
    world.answer(1, assigned=False)
    assert world.quiet() == world.now + INTERVAL
    world.now += INTERVAL
    third = world.beat()
    assert third.topic_partitions is None and third.server_assignor is None and third.rack_id is None


def test_it_revokes_first_says_so_at_once_and_takes_what_comes_after() -> None:
    world = World().joined(0, 1, 2)
    world.now += INTERVAL
    world.beat()
    world.answer(1, 0)
    assert world.member.owned == owned(0, 1, 2)
    assert isinstance(world.member.next(world.now), WaitUntil)
    world.carry_out(Revoke(owned(1, 2)))
    told = world.beat()
    assert told.topic_partitions == [TopicPartitions(topic_id=FLIGHTS, partitions=[0])]
    world.answer(2, 0, 5)
    world.carry_out(Assign(owned(5)))
    assert world.member.owned == owned(0, 5) and world.member.epoch == 2


def test_heartbeats_go_on_while_the_application_lets_go() -> None:
    world = World().joined(0, 1)
    world.now += INTERVAL
    world.beat()
    world.answer(1, 0)
    revoke = world.member.take()
    for _ in range(3):
        world.now += INTERVAL
        assert world.beat().topic_partitions is None
        world.answer(1, 0)
        assert world.member.take() is None
    assert revoke is not None
    world.member.done(revoke, world.now)
    assert world.beat().topic_partitions == [TopicPartitions(topic_id=FLIGHTS, partitions=[0])]


def test_what_was_given_and_taken_back_before_the_application_took_it_is_acknowledged_too() -> None:
    world = World().joined()
    world.now += INTERVAL
    world.beat()
    world.answer(2, 0, 1)
    assert world.member.event() == Assign(owned(0, 1))
    world.now += INTERVAL
    assert world.beat().topic_partitions is None
    world.answer(2, assigned=True)
    assert world.member.event() is None
    assert world.beat().topic_partitions == []


@pytest.mark.parametrize("code", [ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID])
def test_who_is_fenced_loses_all_and_joins_again_with_the_same_id(code: ErrorCode) -> None:
    world = World().joined(0, 1, epoch=7)
    world.now += INTERVAL
    world.beat()
    world.answer(0, error=code)
    assert world.member.phase is Phase.FENCED and not world.member.is_member
    assert world.quiet() is None
    world.carry_out(Lost(owned(0, 1)))
    again = world.beat()
    assert (again.member_id, again.member_epoch, again.topic_partitions) == ("m1", 0, [])
    assert again.subscribed_topic_names == ["flights"]


def test_partitions_that_are_being_let_go_of_when_it_is_fenced_are_not_lost_twice() -> None:
    world = World().joined(0, 1)
    world.now += INTERVAL
    world.beat()
    world.answer(1, 0)
    revoke = world.member.take()
    world.now += INTERVAL
    world.beat()
    world.answer(0, error=ErrorCode.FENCED_MEMBER_EPOCH)
    assert world.member.event() is None
    assert revoke is not None
    world.member.done(revoke, world.now)
    world.carry_out(Lost(owned(0)))
    assert world.beat().member_epoch == 0


def test_after_a_request_that_failed_it_says_everything_again_with_its_epoch() -> None:
    world = World().joined(0)
    world.now += INTERVAL
    world.beat()
    world.member.on_error(world.ticket, DisconnectedError("gone"), world.now)
    assert world.quiet() == world.now + 100
    world.now += 100
    full = world.beat()
    assert (full.member_epoch, full.rebalance_timeout_ms, full.subscribed_topic_names) == (1, 60_000, ["flights"])
    assert full.topic_partitions == [TopicPartitions(topic_id=FLIGHTS, partitions=[0])]
    world.answer(0, error=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    assert world.quiet() == world.now + 200
    assert world.member.owned == owned(0)


def test_an_answer_that_comes_too_late_is_not_heard() -> None:
    world = World().joined(0)
    world.now += INTERVAL
    world.beat()
    late = world.ticket
    world.member.on_error(late, DisconnectedError("no answer"), world.now)
    world.now += 100
    world.beat()
    world.answer(2, 0)
    world.ticket = late
    world.answer(9, 0, 1, 2)
    assert world.member.epoch == 2 and world.member.event() is None


def test_a_partition_of_a_topic_nobody_can_name_waits_and_the_others_do_not() -> None:
    world = World(named=False)
    world.beat()
    world.answer(1, 0)
    assert world.member.event() is None
    assert world.member.wanted_ids == {FLIGHTS}
    world.member.on_topics([TopicFacts("flights", FLIGHTS, 3)])
    assert world.member.wanted_ids == frozenset()
    world.carry_out(Assign(owned(0)))


def test_a_recreated_topic_is_another_one() -> None:
    world = World().joined(0)
    world.member.on_topics([TopicFacts("flights", AIRPORTS, 1)])
    world.now += INTERVAL
    world.beat()
    world.answer(2, 0, topic_id=AIRPORTS)
    world.carry_out(Revoke(owned(0)))
    world.carry_out(Assign(frozenset({Owned("flights", 0, AIRPORTS)})))


def test_who_does_not_poll_leaves_and_learns_at_the_next_poll_what_it_lost() -> None:
    world = World().joined(0, 1)
    world.member.poll_began(world.now)
    world.member.poll_ended(world.now)
    last = world.now + 60_000
    world.now = last - 1
    world.beat()
    world.answer(1, assigned=False)
    assert world.quiet() == last
    world.now = last
    assert world.beat().member_epoch == -1
    assert not world.member.is_member
    world.answer(-1, assigned=False)
    assert world.quiet() is None
    world.now += 60_000
    world.member.poll_began(world.now)
    world.carry_out(Lost(owned(0, 1)))
    assert world.beat().member_epoch == 0


def test_who_has_slices_learns_that_they_are_lost_though_nothing_is_assigned() -> None:
    world = World(share="any").joined()
    world.member.poll_ended(world.now)
    world.now += 60_000
    assert world.beat().member_epoch == -1
    world.answer(-1, assigned=False)
    world.member.poll_began(world.now)
    assert world.quiet() is None, "not before the application has dropped them"
    world.carry_out(Lost(owned()))
    assert world.beat().member_epoch == 0
    world.answer(5)
    world.now += INTERVAL
    world.beat()
    world.answer(0, error=ErrorCode.FENCED_MEMBER_EPOCH)
    world.carry_out(Lost(owned()))
    assert world.beat().member_epoch == 0


def test_who_leaves_is_not_told_of_slices() -> None:
    world = World(share="any").joined()
    world.now += INTERVAL
    world.beat()
    world.member.leave()
    world.answer(0, error=ErrorCode.FENCED_MEMBER_EPOCH)
    assert world.member.has_left and world.member.event() is None


def test_a_poll_that_waits_long_is_alive() -> None:
    world = World().joined(0)
    world.member.poll_ended(world.now)
    world.member.poll_began(world.now)
    world.now += 600_000
    assert world.beat().member_epoch == 1


@pytest.mark.parametrize(
    ("instance_id", "stay", "epoch"),
    [(None, None, -1), (None, False, -1), (None, True, None), ("i", None, -2), ("i", False, -1), ("i", True, -2)],
)
def test_it_leaves_when_the_application_has_let_go(
    instance_id: str | None, stay: bool | None, epoch: int | None
) -> None:
    world = World(group_instance_id=instance_id).joined(0)
    world.member.leave(stay=stay)
    assert world.quiet() is None
    assert world.member.is_member
    world.carry_out(Revoke(owned(0)))
    if epoch is not None:
        request = world.beat()
        assert (request.member_epoch, request.instance_id) == (epoch, instance_id)
        assert not world.member.has_left
        world.answer(epoch, assigned=False)
    assert world.member.has_left


def test_leaving_is_tried_twice_and_given_up() -> None:
    world = World().joined()
    world.member.leave()
    for wait in (100, 0):
        assert world.beat().member_epoch == -1
        world.member.on_error(world.ticket, DisconnectedError("gone"), world.now)
        world.now += wait
    assert world.member.has_left


def test_a_subscription_that_changed_is_told_at_once() -> None:
    world = World().joined(0)
    world.member.subscribe(Subscription(pattern="fl.*"))
    request = world.beat()
    assert (request.subscribed_topic_names, request.subscribed_topic_regex) == ([], "fl.*")
    world.answer(1, assigned=False)
    world.member.subscribe(Subscription(frozenset({"airports"})))
    request = world.beat()
    assert (request.subscribed_topic_names, request.subscribed_topic_regex) == (["airports"], "")
    world.answer(1, assigned=False)
    assert isinstance(world.member.next(world.now), WaitUntil)


@pytest.mark.parametrize(
    "code", [ErrorCode.UNRELEASED_INSTANCE_ID, ErrorCode.GROUP_MAX_SIZE_REACHED, ErrorCode.UNSUPPORTED_ASSIGNOR]
)
def test_who_is_refused_says_why_and_may_subscribe_again(code: ErrorCode) -> None:
    world = World(group_instance_id="i")
    world.beat()
    world.answer(0, error=code, error_message="no")
    for _ in range(2):
        event = world.member.take()
        assert isinstance(event, Failed) and event.error.code is code
        world.member.done(event, world.now)
    assert world.quiet() is None
    world.member.subscribe(Subscription(frozenset({"flights"})))
    assert world.beat().member_epoch == 0


def test_a_broker_that_cannot_do_it_is_final() -> None:
    world = World()
    world.beat()
    world.member.on_error(world.ticket, ApiError(ErrorCode.UNSUPPORTED_VERSION, "old"), world.now)
    assert isinstance(world.member.event(), Failed)


class Everything(PartitionAssignor):
    """Gives all to the first."""

    def __init__(self) -> None:
        self.reason = 0

    @property
    def name(self) -> str:
        return "everything"

    def metadata(self) -> AssignorMetadata:
        return AssignorMetadata(0, b"hello", self.reason)

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        first, *others = sorted(spec.members)
        every = frozenset(
            TopicIdPartition(topic_id, number)
            for topic_id, topic in spec.topics.items()
            for number in range(topic.partition_count)
        )
        given = {first: MemberAssignment(every, AssignorMetadata(0, b"all"))}
        return GroupAssignment({**given, **dict.fromkeys(others, MemberAssignment())})


def prepared(assignor: str = "everything") -> ConsumerGroupPrepareAssignmentResponse:
    said = Assignor(reason=0, metadata_version=0, metadata_bytes=b"hello")
    return ConsumerGroupPrepareAssignmentResponse(
        group_epoch=5,
        assignor_name=assignor,
        members=[
            Member(member_id=name, member_epoch=4, subscribed_topic_ids=[FLIGHTS], assignor=said)
            for name in ("m1", "m2")
        ],
        topics=[TopicMetadata(topic_id=FLIGHTS, topic_name="flights", num_partitions=2)],
    )


def test_it_computes_the_assignment_when_it_is_asked() -> None:
    assignor = Everything()
    world = World(local_assignors=[assignor])
    [offered] = world.beat().client_assignors or ()
    assert (offered.name, offered.metadata_bytes, offered.minimum_version) == ("everything", b"hello", 0)
    world.answer(4, should_compute_assignment=True)
    world.carry_out(Explain(0, MemberAssignment(frozenset(), AssignorMetadata()), 4))
    prepare = world.member.next(world.now)
    assert isinstance(prepare, Send) and isinstance(prepare.request, ConsumerGroupPrepareAssignmentRequest)
    assert prepare.request.member_epoch == 4
    world.member.on_response(prepare.ticket, prepared(), world.now)
    compute = world.member.next(world.now)
    assert isinstance(compute, Compute)
    world.now += INTERVAL
    world.beat()
    world.answer(4, assigned=False)
    world.member.on_response(compute.ticket, compute.work(), world.now)
    install = world.member.next(world.now)
    assert isinstance(install, Send) and isinstance(install.request, ConsumerGroupInstallAssignmentRequest)
    assert (install.request.group_epoch, install.request.error) == (5, 0)
    given = {one.member_id: [tuple(topic.partitions) for topic in one.partitions] for one in install.request.members}
    assert given == {"m1": [(0, 1)], "m2": []}
    world.member.on_response(install.ticket, ConsumerGroupInstallAssignmentResponse(), world.now)
    world.beat()
    world.answer(5, 0, 1)
    whole = frozenset({TopicIdPartition(FLIGHTS, 0), TopicIdPartition(FLIGHTS, 1)})
    world.carry_out(Explain(0, MemberAssignment(whole, AssignorMetadata()), 5))
    world.carry_out(Assign(owned(0, 1)))


def test_an_assignor_that_raises_is_reported_as_an_error() -> None:
    world = World(local_assignors=[Everything()])
    world.beat()
    world.answer(4, should_compute_assignment=True)
    prepare, _ = world.sent()
    world.member.on_response(prepare, prepared(), world.now)
    compute = world.member.next(world.now)
    assert isinstance(compute, Compute)
    world.beat()
    world.member.on_error(compute.ticket, RuntimeError("oh"), world.now)
    _, install = world.sent()
    assert (install.error, install.members) == (ASSIGNMENT_ERROR, [])
    assert isinstance(world.member.assignor_error, RuntimeError)


def test_a_stale_epoch_waits_for_the_heartbeat_that_brings_the_new_one() -> None:
    world = World(local_assignors=[Everything()])
    world.beat()
    world.answer(4, should_compute_assignment=True)
    prepare, _ = world.sent()
    refused = ConsumerGroupPrepareAssignmentResponse(error_code=int(ErrorCode.STALE_MEMBER_EPOCH))
    world.member.on_response(prepare, refused, world.now)
    world.beat()
    world.answer(5, assigned=False)
    _, request = world.sent()
    assert isinstance(request, ConsumerGroupPrepareAssignmentRequest) and request.member_epoch == 5


def test_an_assignor_that_asks_for_a_rebalance_is_heard_with_the_next_heartbeat() -> None:
    assignor = Everything()
    world = World(local_assignors=[assignor])
    world.beat()
    world.answer(4, assigned=False)
    assignor.reason = 1
    world.now += INTERVAL
    [offered] = world.beat().client_assignors or ()
    assert offered.reason == 1
    world.answer(4, assigned=False)
    world.now += INTERVAL
    assert world.beat().client_assignors is None


def test_as_long_as_its_epoch_is_zero_it_says_everything() -> None:
    """Until somebody has computed the first assignment, each heartbeat is one that joins."""
    world = World(local_assignors=[Everything()])
    world.beat()
    world.answer(0)
    world.now += INTERVAL
    again = world.beat()
    assert again.member_epoch == 0 and again.subscribed_topic_names == ["flights"]
    assert [offered.name for offered in again.client_assignors or ()] == ["everything"]
    assert not world.member.is_member


def test_it_does_not_spin_while_the_coordinator_or_the_assignor_is_at_work() -> None:
    world = World(local_assignors=[Everything()])
    world.beat()
    world.answer(4, should_compute_assignment=True)
    assert isinstance(world.member.next(world.now), Send)
    world.beat()
    due = world.quiet()
    assert due is None or due > world.now


def test_what_it_did_not_say_to_own_it_does_not_take_before_it_is_told_again() -> None:
    world = World().joined(0)
    world.now += INTERVAL
    world.beat()
    world.answer(2, 0, 1)
    world.member.subscribe(Subscription(frozenset({"flights"})))
    world.beat()
    world.member.on_error(world.ticket, DisconnectedError("gone"), world.now)
    world.now += INTERVAL
    assert world.beat().topic_partitions == [TopicPartitions(topic_id=FLIGHTS, partitions=[0])]
    assert world.member.event() is None  # flights-1 may be another's by the time that the coordinator reads this
    world.answer(3, 0)
    assert world.member.event() is None
    world.now += INTERVAL
    world.beat()
    world.answer(4, 0, 1)
    world.carry_out(Assign(owned(1)))


def test_what_the_application_is_about_to_take_counts_as_owned() -> None:
    world = World().joined(0)
    world.now += INTERVAL
    world.beat()
    world.answer(2, 0, 1)
    taking = world.member.take()
    assert taking == Assign(owned(1))
    world.member.subscribe(Subscription(frozenset({"flights"})))
    assert world.beat().topic_partitions == [TopicPartitions(topic_id=FLIGHTS, partitions=[0, 1])]
    world.answer(2, 0, 1)
    world.member.done(taking, world.now)
    assert world.member.owned == owned(0, 1)


def test_a_pattern_that_is_none_any_more_is_taken_back_after_a_request_that_failed_too() -> None:
    world = World()
    world.member.subscribe(Subscription(pattern="fl.*"))
    world.joined(0)
    world.now += INTERVAL
    world.beat()
    world.member.on_error(world.ticket, DisconnectedError("gone"), world.now)
    world.member.subscribe(Subscription(frozenset({"flights"})))
    world.now += INTERVAL
    full = world.beat()
    assert (full.subscribed_topic_names, full.subscribed_topic_regex) == (["flights"], "")
    world.answer(1, 0)
    world.now += INTERVAL
    assert world.beat().subscribed_topic_regex is None
