"""ConsumerGroupPosition: questions are parked until there is news, reports count under conditions, bounds hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import gates
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.consumer import heartbeat
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.standing import OPEN_END
from anabranch.machines.lineage import Lineage
from anabranch.machines.outcome import Parked
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatResponse
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionRequestPartition,
    ConsumerGroupPositionRequestTopic,
    ConsumerGroupPositionResponse,
)
from anabranch.protocol.messages.join_group import JoinGroupResponse
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment
from tests.support.groups import GROUP, GroupWorld, assignment, subscription, topic_id

FOO = topic_id("foo")
TIMEOUT_MS = 60_000


def grown(end: int = 5, log_end: int = 100) -> Image:
    """Topic foo had one partition, which `end` records went into, and has two."""
    lineage = Lineage.of_ends(1, (1, 2), ({0: end},))
    return Image(2, {"foo": TopicImage(FOO, "foo", (0, 1), lineage=lineage, log_end=lambda _: log_end)})


def flat() -> Image:
    return Image(1, {"foo": TopicImage(FOO, "foo", (0,), lineage=Lineage.flat(1), log_end=lambda _: 5)})


class Asking(GroupWorld):
    """A world whose members ask for positions."""

    def ask(
        self,
        member: str,
        epoch: int,
        *,
        needs: Iterable[tuple[int, int]] = (),
        reports: Iterable[tuple[int, int]] = (),
        flushed: Iterable[tuple[int, int]] = (),
        wait_ms: int = 10_000,
        by_id: bool = True,
    ) -> ConsumerGroupPositionResponse | int:
        """The answer, or the ticket of a parked question."""
        parts = [
            *(ConsumerGroupPositionRequestPartition(partition=n, need_position=True, position=p) for n, p in needs),
            *(ConsumerGroupPositionRequestPartition(partition=n, position=p) for n, p in reports),
            *(ConsumerGroupPositionRequestPartition(partition=n, flushed=at) for n, at in flushed),
        ]
        said: dict[str, Any] = {"topic_id": FOO} if by_id else {}
        request = ConsumerGroupPositionRequest(
            group_id=GROUP,
            generation_id=epoch,
            member_id=member,
            topics=[ConsumerGroupPositionRequestTopic(topic="foo", partitions=parts, **said)],
            max_wait_ms=wait_ms,
        )
        self.tickets += 1
        ticket = self.tickets
        answer = self.submit(lambda machine: machine.consumer_group_position(request, ticket, self.now_ms))
        assert isinstance(answer, ConsumerGroupPositionResponse | Parked)
        if isinstance(answer, Parked):
            return self.answers.get(ticket, ticket)  # type: ignore[no-any-return]
        return answer

    def commit(self, member: str, epoch: int, partition: int, offset: int, group: str = GROUP) -> None:
        request = OffsetCommitRequest(
            group_id=group,
            member_id=member,
            generation_id_or_member_epoch=epoch,
            topics=[
                OffsetCommitRequestTopic(
                    name="foo",
                    partitions=[OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)],
                )
            ],
        )
        answer = self.submit(lambda machine: machine.offset_commit(request, Caller(version=9), self.now_ms))
        assert answer.topics[0].partitions[0].error_code == ErrorCode.NONE

    def told_of(self, answer: ConsumerGroupPositionResponse | int) -> list[tuple[int, bool, int, bool]]:
        """Partition, wish, position, overdue of an answer, parked or not."""
        found = self.answers[answer] if isinstance(answer, int) else answer
        assert found.error_code == ErrorCode.NONE, ErrorCode(found.error_code)
        return [
            (p.partition, p.need_position, p.position, p.overdue) for topic in found.topics for p in topic.partitions
        ]

    def by_time_of(self, answer: ConsumerGroupPositionResponse | int) -> list[int]:
        """By partition up to where it counts as read by time: -1 for nowhere, `OPEN_END` for all records."""
        found = self.answers[answer] if isinstance(answer, int) else answer
        parts = [part for topic in found.topics for part in topic.partitions]
        return [(OPEN_END if p.overdue_to < 0 else p.overdue_to) if p.overdue else -1 for p in parts]


def two_members(world: Asking) -> tuple[int, int]:
    """A owns partition 0 since before the resize, B is to have partition 1; their epochs."""
    world.join("A")
    world.set_topics(grown())
    a = settle(world, "A", 1)
    b = world.join("B").member_epoch
    a = settle(world, "A", a)
    b = settle(world, "B", b)
    assert world.named(world.group.members["A"].assigned) == "foo-0"
    return a, b


def settle(world: Asking, member: str, epoch: int) -> int:
    answer = world.beat(member, epoch)
    for _ in range(3):
        assert isinstance(answer, ConsumerGroupHeartbeatResponse)
        epoch = answer.member_epoch
        owned = world.named(world.group.members[member].assigned)
        answer = world.beat(member, epoch, owned)
    return answer.member_epoch


def test_a_question_is_answered_at_once_where_the_coordinator_knows_something_else() -> None:
    world = Asking(flat())
    _, b = two_members(world)
    assert world.told_of(world.ask("B", b, needs=[(0, -1)])) == [(0, False, 0, False)]


def test_a_parked_question_is_answered_when_the_owner_commits() -> None:
    world = Asking(flat())
    a, b = two_members(world)
    ticket = world.ask("B", b, needs=[(0, 0)])
    assert isinstance(ticket, int) and ticket not in world.answers
    world.commit("A", a, 0, 3)
    assert world.told_of(ticket) == [(0, False, 3, False)]


def test_the_owner_of_a_needed_partition_is_asked_for_a_report_once() -> None:
    world = Asking(flat())
    a, b = two_members(world)
    assert world.told_of(world.ask("A", a)) == [(0, True, -1, False)], "the coordinator's own gate waits on it"
    ticket = world.ask("A", a, reports=[(0, -1)])
    assert isinstance(ticket, int) and ticket not in world.answers
    world.ask("B", b, needs=[(0, 0)])
    assert ticket not in world.answers


def test_the_reported_start_of_a_member_without_a_commit_opens_the_gate() -> None:
    world = Asking(flat())
    a, b = two_members(world)
    waiting = world.ask("B", b)
    world.ask("A", a, reports=[(0, 5)])
    assert isinstance(waiting, int)
    assert world.answers[waiting].error_code == ErrorCode.REBALANCE_IN_PROGRESS, "B's heartbeat would be given foo-1"
    assert world.told(world.beat("B", b)) == "foo-1"


def test_a_report_that_cannot_be_right_is_ignored() -> None:
    world = Asking(flat())
    a, b = two_members(world)
    world.commit("A", a, 0, 3)
    world.ask("A", a, reports=[(0, 2)], wait_ms=0)
    world.ask("A", a, reports=[(0, 101)], wait_ms=0)
    world.ask("B", b, reports=[(0, 5)], wait_ms=0)
    assert world.told_of(world.ask("B", b, needs=[(0, -1)])) == [(0, False, 3, False)]


def test_a_report_does_not_outlive_the_commit_that_it_follows_from() -> None:
    """Between 3 and 5 was nothing to read, which says nothing of what a rewind makes the owner read again."""
    world = Asking(flat())
    a, b = two_members(world)
    world.commit("A", a, 0, 3)
    world.ask("A", a, reports=[(0, 5)], wait_ms=0)
    b = settle(world, "B", b)
    assert world.told_of(world.ask("B", b, needs=[(0, -1)])) == [(0, False, 5, False)]
    world.commit("A", a, 0, 4)
    assert world.told_of(world.ask("B", b, needs=[(0, -1)])) == [(0, False, 5, False)]
    world.commit("A", a, 0, 1)
    assert world.told_of(world.ask("B", b, needs=[(0, -1)])) == [(0, False, 1, False)]


def test_a_new_owner_does_not_inherit_the_start_of_the_old_one() -> None:
    world = Asking(flat())
    a, b = two_members(world)
    world.ask("A", a, reports=[(0, 5)], wait_ms=0)
    world.leave("A")
    b = settle(world, "B", b)
    assert world.named(world.group.members["B"].assigned) == "foo-0", "nothing of foo-0 is known to be read"
    assert world.told_of(world.ask("B", b, needs=[(0, -1)], wait_ms=0))[0] == (0, False, 0, False)


def test_a_marker_behind_the_commit_is_read_with_it() -> None:
    world = Asking(flat())
    world.next_records["foo", 0] = lambda offset: 5 if offset == 4 else offset
    a, b = two_members(world)
    world.commit("A", a, 0, 4)
    assert world.told(world.beat("B", b)) == "foo-1"


def test_a_position_that_stands_still_with_records_left_is_overdue_after_the_owners_timeout() -> None:
    world = Asking(flat())
    a, b = two_members(world)
    world.commit("A", a, 0, 3)
    ticket = world.ask("B", b, needs=[(0, 3)])
    for _ in range(TIMEOUT_MS // 10_000 + 1):
        assert isinstance(ticket, int)
        if ticket in world.answers:
            ticket = world.ask("B", b, needs=[(0, 3)])
        world.advance(10_000)
        world.beat("A", a)
        world.beat("B", b)
    found = ticket if isinstance(ticket, ConsumerGroupPositionResponse) else world.answers[ticket]
    assert found.error_code == ErrorCode.REBALANCE_IN_PROGRESS or world.told_of(found) == [(0, False, 3, True)]
    assert world.named(world.group.members["B"].assigned) == "foo-1"
    (effect,) = world.effects
    assert (effect.partition, effect.waited_on, effect.records_left) == (1, 0, 2)


def test_a_question_ends_at_its_time_and_with_the_next_one() -> None:
    world = Asking(flat())
    a, _ = two_members(world)
    first = world.ask("A", a, reports=[(0, -1)], wait_ms=1_000_000)
    second = world.ask("A", a, reports=[(0, -1)], wait_ms=1_000_000)
    assert isinstance(first, int) and world.answers[first].error_code == ErrorCode.NONE
    assert isinstance(second, int) and second not in world.answers
    world.advance(22_499)
    assert second not in world.answers
    world.advance(2)
    assert second in world.answers, "half of the session timeout is the longest wait"


def test_a_dropped_question_is_forgotten() -> None:
    world = Asking(flat())
    a, _ = two_members(world)
    ticket = world.ask("A", a, reports=[(0, -1)])
    world.submit(lambda machine: machine.position_dropped(GROUP, "A", ticket))
    world.advance(30_000)
    assert ticket not in world.answers


def test_only_members_at_their_epoch_are_answered_and_only_about_their_subscription() -> None:
    world = Asking(flat())
    a, _ = two_members(world)
    for member, epoch, error in (
        ("nobody", 1, ErrorCode.UNKNOWN_MEMBER_ID),
        ("A", a - 1, ErrorCode.STALE_MEMBER_EPOCH),
        ("A", a + 1, ErrorCode.FENCED_MEMBER_EPOCH),
    ):
        answer = world.ask(member, epoch)
        assert isinstance(answer, ConsumerGroupPositionResponse) and answer.error_code == error
    assert (7, False, -1, False) in world.told_of(world.ask("A", a, needs=[(7, 4)], wait_ms=0))


def test_a_question_about_far_more_partitions_than_there_are_is_refused() -> None:
    world = Asking(flat())
    a, _ = two_members(world)
    answer = world.ask("A", a, needs=[(number, -1) for number in range(1_005)])
    assert isinstance(answer, ConsumerGroupPositionResponse) and answer.error_code == ErrorCode.INVALID_REQUEST


def test_a_question_about_far_more_topics_than_there_are_is_refused() -> None:
    """An entry without partitions costs as much as one with some: 300,000 of them stopped the loop for seconds."""
    world = Asking(flat())
    a, _ = two_members(world)
    entries = [ConsumerGroupPositionRequestTopic(topic="nowhere", partitions=[]) for _ in range(1_005)]
    answers = []
    for topics in (entries, entries[:900]):
        question = ConsumerGroupPositionRequest(
            group_id=GROUP, generation_id=a, member_id="A", topics=topics, max_wait_ms=0
        )
        answers.append(
            world.submit(lambda machine, it=question: machine.consumer_group_position(it, "t", world.now_ms))
        )
    assert [answer.error_code for answer in answers] == [ErrorCode.INVALID_REQUEST, ErrorCode.NONE]


def test_nothing_is_kept_of_a_topic_that_is_deleted() -> None:
    world = Asking(flat())
    a, _ = two_members(world)
    world.commit("A", a, 0, 3)
    world.ask("A", a, reports=[(0, 3)])
    known = world.coordinator.keeper.known(GROUP)
    assert known is not None and known.topic_ids == {FOO} and known.waited
    world.set_topics(Image(3, {}))
    world.beat("A", a)
    world.advance(1_000)
    assert not known.topic_ids and not known.waited and not known.standing.watches


def test_a_waiting_partition_is_described_with_its_owner_the_way_and_the_rate() -> None:
    world = Asking(flat())
    a, _ = two_members(world)
    world.advance(1_000)
    world.commit("A", a, 0, 2)
    world.advance(1_000)
    (waiting,) = world.coordinator.describe_consumer_group(GROUP, world.now_ms).waiting_partitions
    assert (waiting.topic_name, waiting.partition, waiting.waits_ms) == ("foo", 1, 2_000)
    (on,) = waiting.waits_on
    assert (on.partition, on.member_id, on.position, on.offset, on.records_per_second) == (0, "A", 2, 5, 1.0)
    world.commit("A", a, 0, 5)
    assert not world.coordinator.describe_consumer_group(GROUP, world.now_ms).waiting_partitions


# -- the classic protocol ------------------------------------------------------------------------------------------


def classic_generation(
    world: Asking, member: str = "", owned: str = "foo-0", instance: str | None = None
) -> tuple[str, int]:
    """Have the only classic member join and be given partitions; its id and generation."""
    protocols = {"range": subscription("foo")}
    joining = world.join_classic(member, protocols, version=3 if instance is None else 9, instance=instance)
    world.advance(3_001)
    joined = joining if isinstance(joining, JoinGroupResponse) else world.answers[joining]
    handed = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment(owned))
    world.sync_classic(joined.member_id, joined.generation_id, [handed])
    return joined.member_id, joined.generation_id


def classic_group(world: Asking, instance: str | None = None, owned: str = "foo-0") -> tuple[str, int]:
    """One classic member, of a topic that has grown since; its id and generation."""
    joined = classic_generation(world, owned=owned, instance=instance)
    world.set_topics(grown())
    return joined


def test_a_classic_member_is_told_of_positions_and_of_a_rebalance() -> None:
    world = Asking(flat())
    member, generation = classic_group(world)
    assert world.told_of(world.ask(member, generation, needs=[(0, -1)])) == [(0, False, 0, False)]
    ticket = world.ask(member, generation, needs=[(0, 0)])
    world.commit(member, generation, 0, 4)
    assert world.told_of(ticket) == [(0, False, 4, False)]
    ticket = world.ask(member, generation, needs=[(0, 4)])
    assert isinstance(ticket, int) and ticket not in world.answers
    world.join_classic("", {"range": subscription("foo")}, version=3, fresh="other")
    assert world.answers[ticket].error_code == ErrorCode.REBALANCE_IN_PROGRESS
    answer = world.ask(member, generation)
    assert isinstance(answer, ConsumerGroupPositionResponse)
    assert answer.error_code == ErrorCode.REBALANCE_IN_PROGRESS


@pytest.mark.parametrize("committed", [None, 3])
def test_a_classic_position_is_overdue_although_every_question_ends_before(committed: int | None) -> None:
    """Nothing is asked between two questions while the group is looked at: the position has stood still all the same.

    A member that owns parent and child and commits nothing, or too little, waited for ever: the time began anew with
    every question.
    """
    world = Asking(flat())
    member, generation = classic_group(world)
    if committed is None:
        world.ask(member, generation, reports=[(0, 0)], wait_ms=0)
    else:
        world.commit(member, generation, 0, committed)
    known, began_ms, questions = -1, world.now_ms, 0
    while True:
        ticket = world.ask(member, generation, needs=[(0, known)])
        questions += 1
        while isinstance(ticket, int) and ticket not in world.answers:
            world.advance(1_000)
            world.beat_classic(member, generation)
        ((_, _, known, is_overdue),) = world.told_of(ticket)
        if is_overdue:
            break
        world.advance(700)
        assert world.now_ms - began_ms <= TIMEOUT_MS + 1_000, "the gate stays closed"
    assert world.now_ms - began_ms >= TIMEOUT_MS and questions < 10, "questions are parked"
    ticket = world.ask(member, generation, needs=[(0, known)])
    assert isinstance(ticket, int) and ticket not in world.answers, "told once"


def test_a_static_classic_member_that_comes_back_owns_its_partitions_under_its_new_id() -> None:
    """Its generation goes on. Gates would not have opened by time any more, and no report of it have counted."""
    world = Asking(flat())
    former, generation = classic_group(world, "one", "foo-0 foo-1")
    world.ask(former, generation, needs=[(0, -1)], wait_ms=0)
    parked = world.ask(former, generation, needs=[(0, 0)])
    joined = world.join_classic("", {"range": subscription("foo")}, instance="one", fresh="again")
    assert isinstance(joined, JoinGroupResponse)
    member = joined.member_id
    assert member != former and joined.generation_id == generation
    world.advance(1)
    assert isinstance(parked, int) and world.answers[parked].error_code == ErrorCode.UNKNOWN_MEMBER_ID
    world.ask(member, generation, reports=[(0, 2)], wait_ms=0)
    assert world.told_of(world.ask(member, generation, needs=[(0, -1)], wait_ms=0)) == [(0, False, 2, False)]
    began_ms = world.now_ms
    while not world.told_of(world.ask(member, generation, needs=[(0, -1)], wait_ms=0))[0][3]:
        world.advance(1_000)
        world.beat_classic(member, generation)
        assert world.now_ms - began_ms <= TIMEOUT_MS + 2_000, "the gate stays closed"
    gates = world.coordinator.keeper.of(GROUP)
    assert {*gates.questions.replied, *gates.standing.spoken} == {member}, "what its former id was told is kept"


def test_of_a_static_member_that_comes_back_nothing_is_kept_under_its_former_id() -> None:
    world = Asking(flat())
    two_members(world)
    static = world.join("C", instance_id="one").member_epoch
    static = settle(world, "C", static)
    world.ask("C", static, needs=[(0, -1)], wait_ms=0)
    gates = world.coordinator.keeper.of(GROUP)
    assert "C" in gates.questions.replied and "C" in gates.standing.spoken
    world.beat("C", -2, instance_id="one")
    world.join("D", instance_id="one")
    assert "D" in world.group.members and "C" not in world.group.members
    assert "C" not in gates.questions.replied and "C" not in gates.standing.spoken


def test_a_classic_member_of_another_generation_is_refused() -> None:
    world = Asking(flat())
    member, generation = classic_group(world)
    for other, epoch, error in (
        (member, generation + 1, ErrorCode.ILLEGAL_GENERATION),
        ("nobody", generation, ErrorCode.UNKNOWN_MEMBER_ID),
    ):
        answer = world.ask(other, epoch)
        assert isinstance(answer, ConsumerGroupPositionResponse) and answer.error_code == error


def test_the_parked_questions_of_a_removed_member_are_answered() -> None:
    world = Asking(flat())
    a, _ = two_members(world)
    ticket = world.ask("A", a, reports=[(0, -1)])
    assert isinstance(ticket, int) and ticket not in world.answers
    world.leave("A")
    assert world.answers[ticket].error_code == ErrorCode.UNKNOWN_MEMBER_ID


# -- the work it takes ---------------------------------------------------------------------------------------------


def test_heartbeats_without_news_decide_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 12: all gates were evaluated at every heartbeat."""
    world = Asking(flat())
    a, b = two_members(world)
    world.commit("A", a, 0, 3)
    world.advance(1_000)
    world.beat("B", b)

    def undecided(*_: Any) -> Any:
        raise AssertionError("a gate is decided")

    monkeypatch.setattr(gates, "judge", undecided)
    monkeypatch.setattr(heartbeat, "reconcile", undecided)
    for _ in range(3):
        world.advance(1_000)
        assert world.beat("B", b).error_code == ErrorCode.NONE
        world.commit("A", a, 0, 4)


def test_leaders_are_asked_one_question_at_a_time_and_again_while_a_gate_is_closed() -> None:
    world = Asking(flat())
    a, _ = two_members(world)
    world.commit("A", a, 0, 3)
    asked = len(world.asked)
    world.advance(499)
    assert len(world.asked) <= asked + 1
    world.advance(2_000)
    assert 2 <= len(world.asked) - asked <= 6
    assert {ask.offsets[0] for ask in world.asked[asked:]} == {3}
    world.commit("A", a, 0, 5)
    world.advance(10_000)
    asked = len(world.asked)
    world.advance(10_000)
    assert len(world.asked) == asked, "no gate is closed, so no leader is asked"


def delete_offsets(world: Asking, *partitions: int) -> None:
    parts = [OffsetDeleteRequestPartition(partition_index=number) for number in partitions]
    request = OffsetDeleteRequest(group_id=GROUP, topics=[OffsetDeleteRequestTopic(name="foo", partitions=parts)])
    answer = world.submit(lambda machine: machine.offset_delete(request, world.now_ms))
    assert {part.error_code for part in answer.topics[0].partitions} == {ErrorCode.NONE}


def test_where_a_former_owner_stood_counts_no_more_when_its_offsets_are_deleted() -> None:
    world = Asking(flat())
    a = settle(world, "A", world.join("A").member_epoch)
    world.set_topics(grown())
    world.commit("A", a, 0, 5)
    world.ask("A", a, reports=[(0, 5)], wait_ms=0)
    world.beat("A", a, topics=["bar"])
    assert world.named(world.group.members["A"].revoking) == "foo-0"
    delete_offsets(world, 0, 1)
    b = settle(world, "B", world.join("B").member_epoch)
    assert world.named(world.group.members["B"].assigned) == "", "foo-0 is to be read again, from its beginning"
    world.beat("A", a, "")
    settle(world, "B", b)
    assert world.named(world.group.members["B"].assigned) == "foo-0"


def test_the_position_of_a_hand_out_is_not_written_over_where_its_topic_is_subscribed_to() -> None:
    world = Asking(flat())
    a = settle(world, "A", world.join("A").member_epoch)
    world.set_topics(grown())
    assert (FOO, 1) in world.coordinator.keeper.of(GROUP).waited
    world.commit("A", a, 0, 5)
    world.beat("A", a, topics=["bar"])
    delete_offsets(world, 1)
    assert "foo-1" in (world.told(world.join("B")) or "")
    position = world.coordinator.positions.get(GROUP, "foo", 1)
    assert position is not None and position.opened == 1, "the gate that was open at the hand-out"
