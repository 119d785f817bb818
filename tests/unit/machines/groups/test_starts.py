"""Where stock consumers begin: positions that the coordinator writes before it hands a partition out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import settling
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.gatekeeper import LOOK_MS, LOOK_ON_MS, LOOKED_AT_MAX
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.positions_asked import decide_look
from anabranch.machines.groups.resets import LATEST_MAX
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.groups.settling import GROUPS_AT_A_TIME
from anabranch.machines.groups.standing import Owner, Standing
from anabranch.machines.lineage import Lineage
from anabranch.machines.progress import NEVER_REWRITTEN, Rewritten
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from tests.support.groups import GROUP, GroupWorld, assignment, subscription, topic_id
from tests.unit.machines.groups.test_positions_asked import Asking, settle

FOO = topic_id("foo")
TIMEOUT_MS = 60_000
PRODUCER = 7
NEVER = 1 << 62
LATEST = -1
"""The timestamp of a question for the end of the log."""


class Topic:
    """Topic foo, whose logs a test moves."""

    def __init__(self, count: int = 1, *, ordered: bool = True) -> None:
        self.ordered = ordered
        self.counts = [count]
        self.cuts: list[Mapping[int, int]] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.rewritten: dict[int, Rewritten] = {}
        self.version = 1

    def resize(self, count: int) -> Image:
        self.cuts.append({number: self.ends.get(number, 0) for number in range(self.size)})
        self.counts.append(count)
        return self.image()

    @property
    def size(self) -> int:
        return max(self.counts)

    def image(self) -> Image:
        self.version += 1
        resized = len(self.counts) > 1
        lineage = Lineage.of_ends(self.counts[0], self.counts, self.cuts) if resized and self.ordered else None
        now = self.counts[-1]
        made = TopicImage(
            FOO,
            "foo",
            tuple(range(now)),
            tuple(range(now, self.size)),
            lineage,
            lambda number: self.starts.get(number, 0),
            lambda number: self.ends.get(number, 0),
            self.counts[0] if resized else 0,
            rewritten=lambda number: self.rewritten.get(number, NEVER_REWRITTEN),
        )
        return Image(self.version, {"foo": made})


def committed(world: GroupWorld) -> dict[int, int]:
    return {partition: at.offset for (_, partition), at in sorted(world.coordinator.positions.entries(GROUP))}


def assigned(world: GroupWorld, member: str = "A") -> str:
    return world.named(world.group.members[member].assigned)


def test_a_group_that_is_there_at_a_resize_begins_new_partitions_at_their_log_start() -> None:
    topic = Topic()
    world = Asking(topic.image())
    world.join("A")
    topic.ends[0] = 5
    topic.starts[2] = 40
    world.set_topics(topic.resize(3))
    assert committed(world) == {1: 0, 2: 40}
    world.check()


def test_an_empty_group_with_commits_begins_new_partitions_at_their_log_start_too() -> None:
    topic = Topic(ordered=False)
    world = Asking(topic.image())
    world.commit("", -1, 0, 3)
    world.set_topics(topic.resize(2))
    assert committed(world) == {0: 3, 1: 0}


def test_many_groups_are_settled_one_after_the_other() -> None:
    topic = Topic()
    world = Asking(topic.image())
    groups = [f"g{number:03}" for number in range(2 * GROUPS_AT_A_TIME)]
    for group in groups:
        world.join("A", group=group)
    world.set_topics(topic.resize(2))
    positions = world.coordinator.positions
    assert sum(positions.get(group, "foo", 1) is not None for group in groups) == GROUPS_AT_A_TIME
    world.advance(100)
    assert all(positions.get(group, "foo", 1) is not None for group in groups)


def test_groups_of_a_large_topic_are_settled_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "PARTITIONS_AT_A_TIME", 6)
    topic = Topic()
    world = Asking(topic.image())
    groups = [f"g{number}" for number in range(5)]
    for group in groups:
        world.join("A", group=group)
    world.set_topics(topic.resize(3))
    positions = world.coordinator.positions
    assert sum(positions.get(group, "foo", 2) is not None for group in groups) == 2
    world.advance(100)
    assert all(positions.get(group, "foo", 2) is not None for group in groups)


def test_a_group_is_settled_in_a_large_topic_by_several_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "PARTITIONS_AT_A_TIME", 4)
    topic = Topic()
    world = Asking(topic.image())
    world.commit("", -1, 0, 3)
    world.join("A", group="other")
    world.set_topics(topic.resize(11))
    positions = world.coordinator.positions
    assert sum(1 for _ in positions.entries("other")) + len(committed(world)) - 1 <= 4
    world.advance(100)
    assert committed(world) == {0: 3} | dict.fromkeys(range(1, 11), 0)
    assert sum(1 for _ in positions.entries("other")) == 10
    world.reload()
    assert committed(world) == {0: 3} | dict.fromkeys(range(1, 11), 0)


def test_a_classic_group_is_settled_whole_before_its_next_generation_is_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling, "PARTITIONS_AT_A_TIME", 2)
    topic = Topic()
    world = Asking(topic.image())
    joining = world.join_classic("", {"range": subscription("foo")}, version=3)
    world.advance(3_001)
    joined = world.answers[joining] if not hasattr(joining, "member_id") else joining
    handed = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment("foo-0"))
    world.sync_classic(joined.member_id, joined.generation_id, [handed])
    world.set_topics(topic.resize(9))
    assert len(committed(world)) == 1
    again = world.join_classic(joined.member_id, {"range": subscription("foo")}, version=3)
    again = world.answers[again] if not hasattr(again, "member_id") else again
    handed = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment("foo-0"))
    world.sync_classic(joined.member_id, again.generation_id, [handed])
    assert committed(world) == dict.fromkeys(range(1, 9), 0)


def test_a_classic_group_that_a_member_without_its_protocol_joins_is_settled_as_it_was_subscribed() -> None:
    topic = Topic()
    world = Asking(topic.image())
    both = {"sticky": subscription("foo"), "range": subscription("foo")}
    joining = world.join_classic("", both, version=3)
    world.advance(3_001)
    joined = world.answers[joining] if not hasattr(joining, "member_id") else joining
    handed = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment("foo-0"))
    world.sync_classic(joined.member_id, joined.generation_id, [handed])
    world.join_classic("", {"range": subscription("foo")}, version=3, fresh="another")
    world.set_topics(topic.resize(2))
    assert committed(world) == {1: 0}
    world.check()


def test_a_resize_while_no_coordinator_decided_is_made_up_for() -> None:
    topic = Topic()
    world = Asking(topic.image())
    world.join("A")
    world.image = topic.resize(2)
    world.reload()
    assert committed(world) == {1: 0}


def test_partitions_that_existed_when_the_group_began_are_left_to_the_client() -> None:
    """Fault 7: a `latest` group that is formed after a resize reads no history."""
    topic = Topic()
    topic.resize(3)
    topic.ends = {0: 0, 1: 7, 2: 9}
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    assert assigned(world) == "foo-0 foo-1 foo-2" and committed(world) == {}
    topic.ends[0] = 4
    world.set_topics(topic.resize(4))
    settle(world, "A", epoch)
    assert committed(world) == {3: 0}
    world.reload()
    assert committed(world) == {3: 0}, "what existed is written down with the group"
    world.check()


def test_a_latest_group_formed_after_a_resize_gets_what_was_written_while_it_waited_and_no_history() -> None:
    topic = Topic()
    topic.ends[0] = 5
    topic.resize(2)
    topic.ends = {0: 6, 1: 7}
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    assert assigned(world) == "foo-0"
    world.submit(lambda machine: machine.reset_heard(FOO, {0: LATEST}, "client", "/host"))
    topic.ends[1] = 12
    for _ in range(TIMEOUT_MS // 20_000 + 1):
        world.advance(20_000)
        world.beat("A", epoch)
    assert assigned(world) == "foo-0 foo-1"
    assert committed(world) == {1: 7}, "the log end when the group began"


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_partition_that_waited_is_begun_by_no_reset_when_its_group_becomes_a_classic_one(*, is_empty: bool) -> None:
    topic = Topic()
    topic.ends[0] = 5
    topic.resize(2)
    world = Asking(topic.image(), GroupSettings(consumer_migration_policy="bidirectional"))
    settle(world, "A", world.join("A").member_epoch)
    world.advance(LOOK_MS)
    assert assigned(world) == "foo-0"
    if is_empty:
        world.leave("A")
    joining = world.join_classic("", {"range": subscription("foo")}, version=3)
    if not is_empty:
        world.leave("A")
        assert committed(world) == {1: 0}, "whoever is handed it now begins it as its reset says"
    world.advance(3_001)
    joined = world.answers[joining] if not hasattr(joining, "member_id") else joining
    handed = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment("foo-0 foo-1"))
    world.sync_classic(joined.member_id, joined.generation_id, [handed])
    assert committed(world) == {1: 0}


def begun_behind_a_closed_gate() -> tuple[Topic, Asking]:
    """A group that reads from the end, whose owner of foo-0 began behind the gate of a shrink, and has left."""
    topic = Topic()
    topic.ends[0] = 5
    world = Asking(topic.image())
    settle(world, "former", world.join("former").member_epoch)
    world.set_topics(topic.resize(3))
    world.leave("former")
    epoch = settle(world, "A", world.join("A").member_epoch)
    world.submit(lambda machine: machine.reset_heard(FOO, {0: LATEST}, "client", "/host"))
    for _ in range(TIMEOUT_MS // 20_000 + 1):
        world.advance(20_000)
        world.beat("A", epoch)
    epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1 foo-2" and committed(world) == {1: 0, 2: 0}
    topic.ends = {0: 10, 1: 3, 2: 7}
    world.set_topics(topic.resize(1))
    topic.ends[0] = 14
    epoch = world.join("B").member_epoch
    world.leave("A")
    epoch = settle(world, "B", epoch)
    world.ask("B", epoch, reports=[(0, 14)])
    world.join("C")
    settle(world, "B", epoch)
    assert "foo-0" in assigned(world, "B")
    world.leave("B")
    return topic, world


def test_a_partition_that_was_begun_behind_a_closed_gate_is_written_at_the_gate_for_its_next_owner() -> None:
    """It was written at the log end of then, and its next owner took the gate before that for one that was open."""
    topic, world = begun_behind_a_closed_gate()
    topic.ends[0] = 19
    settle(world, "C", world.group.members["C"].epoch)
    assert assigned(world, "C") == "foo-0 foo-1 foo-2" and committed(world) == {0: 10, 1: 0, 2: 0}
    world.check()


def test_a_partition_that_waited_at_a_gate_is_begun_at_its_next_closed_gate_at_the_most() -> None:
    """Where its log ended when the group began lies behind that: the group would take that gate for open once."""
    topic = Topic()
    for count, ends in ((2, {0: 5}), (1, {0: 5, 1: 3}), (2, {0: 9, 1: 3}), (1, {0: 9, 1: 6})):
        topic.ends = ends
        topic.resize(count)
    topic.ends = {0: 12, 1: 6}
    topic.starts[0] = 5
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    world.submit(lambda machine: machine.reset_heard(FOO, {1: LATEST}, "client", "/host"))
    assert assigned(world) == "foo-1"
    world.commit("A", epoch, 1, 3)
    world.advance(LOOK_MS)
    settle(world, "A", epoch)
    assert "foo-0" in assigned(world) and committed(world) == {0: 9, 1: 3}
    world.check()


def test_an_owner_that_has_asked_for_nothing_in_all_of_its_time_is_not_taken_for_one_that_reads_from_the_end() -> None:
    """A member that began slowly had its group lose what the partition that waited held before the group."""
    topic = Topic()
    topic.ends[0] = 5
    topic.resize(2)
    topic.ends = {0: 6, 1: 7}
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    for _ in range(TIMEOUT_MS // 20_000 + 1):
        world.advance(20_000)
        world.beat("A", epoch)
    topic.ends[1] = 12
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1" and committed(world) in ({}, {1: 0})


def waited_for_in_vain() -> tuple[Asking, int]:
    """A member with a partition whose gate opened by time, and the member's epoch."""
    topic = Topic()
    topic.ends[0] = 5
    topic.resize(2)
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    for _ in range(TIMEOUT_MS // 20_000 + 1):
        world.advance(20_000)
        world.beat("A", epoch)
    return world, epoch


def test_after_a_restart_nobody_waits_again() -> None:
    world, _ = waited_for_in_vain()
    assert assigned(world) == "foo-0 foo-1" and committed(world) == {1: 0}
    world.leave("A")
    world.reload()
    settle(world, "B", world.join("B").member_epoch)
    assert assigned(world, "B") == "foo-0 foo-1"
    world.check()


@pytest.mark.parametrize("fails_over", [False, True])
def test_a_partition_that_waited_is_begun_at_its_log_start_where_records_were_deleted_meanwhile(
    *, fails_over: bool
) -> None:
    """What is out of range would be begun where the client's reset says, which may be behind all that was written."""
    topic = Topic()
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    topic.ends[0] = 5
    world.commit("A", epoch, 0, 5)
    world.set_topics(topic.resize(2))
    epoch = settle(world, "A", epoch)
    topic.ends = {0: 8, 1: 4}
    world.commit("A", epoch, 1, 4)
    world.set_topics(topic.resize(1))
    topic.ends = {0: 12, 1: 4}
    epoch = settle(world, "A", epoch)
    world.set_topics(topic.resize(2))
    epoch = settle(world, "A", world.group.members["A"].epoch)
    topic.ends[1] = 9
    world.leave("A")
    epoch = settle(world, "B", world.join("B").member_epoch)
    assert assigned(world, "B") == "foo-0"
    topic.starts[1] = 6
    world.commit("B", epoch, 0, 12)
    if fails_over:
        world.reload()
    settle(world, "B", epoch)
    assert assigned(world, "B") == "foo-0 foo-1" and committed(world) == {0: 12, 1: 6}


def test_the_mark_of_an_open_gate_outlives_a_commit_at_the_same_offset() -> None:
    world, epoch = waited_for_in_vain()
    world.commit("A", epoch, 1, 0)
    world.leave("A")
    settle(world, "B", world.join("B").member_epoch)
    assert assigned(world, "B") == "foo-0 foo-1"


def test_an_earliest_group_formed_after_a_resize_begins_at_the_log_start() -> None:
    topic = Topic()
    topic.ends[0] = 5
    topic.resize(2)
    topic.ends = {0: 6, 1: 7}
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    topic.ends[1] = 12
    world.commit("A", epoch, 0, 5)
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1" and committed(world) == {0: 5, 1: 0}


def test_a_partition_that_re_opens_is_taken_away_at_its_end_and_handed_out_again_when_its_gate_opens() -> None:
    """Fault 8: the order of keys was broken where somebody still owned a retiring partition."""
    topic = Topic()
    world = Asking(topic.image())
    epoch = world.join("A").member_epoch
    topic.ends = {0: 5, 1: 0}
    world.commit("A", epoch, 0, 5)
    world.set_topics(topic.resize(2))
    epoch = settle(world, "A", epoch)
    topic.ends = {0: 5, 1: 3}
    world.commit("A", epoch, 1, 3)
    world.set_topics(topic.resize(1))
    epoch = settle(world, "A", epoch)
    topic.ends[0] = 8
    assert assigned(world) == "foo-0 foo-1"
    world.set_topics(topic.resize(2))
    answer = world.beat("A", epoch)
    assert world.told(answer) == "foo-0"
    epoch = settle(world, "A", world.group.members["A"].epoch)
    assert assigned(world) == "foo-0", "the records between, in foo-0, are not read"
    world.commit("A", epoch, 0, 8)
    epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1" and committed(world) == {0: 8, 1: 3}
    world.check()


def test_a_heartbeat_between_a_leaders_answer_and_the_look_brings_no_partition_behind_a_closed_gate() -> None:
    """The answer says that the next record lies in the next layout, whose gate is closed."""
    topic = Topic(2)
    topic.resize(3)
    topic.ends = {0: 1, 2: 4}
    topic.resize(2)
    topic.ends[0] = 2
    world = Asking(topic.image())
    with mock.patch.object(world, "perform"):
        answer = world.join("A")
        assert assigned(world) == "foo-1 foo-2", "where the next record of foo-0 is, its leader knows"
        world.coordinator.next_records(GROUP, FOO, {0: 0}, {0: 2}, world.now_ms)
        world.beat("A", answer.member_epoch, world.told(answer))
    assert assigned(world) == "foo-1 foo-2", "foo-2 is not read"


@pytest.mark.parametrize("is_late", [False, True])
def test_that_the_log_ended_somewhere_does_not_say_that_the_next_record_is_there_when_there_is_more(
    is_late: bool,
) -> None:
    """It was a marker, so that the next record lay behind the closed gate, and nobody asked again."""
    topic = Topic(2)
    topic.resize(3)
    topic.ends = {0: 1, 2: 4}
    world = Asking(topic.image())
    with mock.patch.object(world, "perform"):
        world.join("A", topics=["bar"])
        world.coordinator.keeper.of(GROUP).asking[FOO, 0] = 1
        if not is_late:
            world.coordinator.next_records(GROUP, FOO, {0: 0}, {0: 1}, world.now_ms)
        topic.ends[0] = 2
        world.set_topics(topic.resize(2))
        topic.ends[0] = 3
        if is_late:
            world.coordinator.next_records(GROUP, FOO, {0: 0}, {0: 1}, world.now_ms)
        world.join("B")
        assert assigned(world, "B") == "foo-1 foo-2"
        world.coordinator.next_records(GROUP, FOO, {0: 1}, {0: 2}, world.now_ms)
        settle(world, "B", world.group.members["B"].epoch)
    assert assigned(world, "B") == "foo-1 foo-2", "foo-2 is not read"


@pytest.mark.parametrize(
    ("timestamp", "is_taken"),
    [
        pytest.param(LATEST, True, id="latest"),
        pytest.param(None, False, id="not heard, so that it may be an earliest one that is slow to commit"),
    ],
)
def test_a_partition_taken_away_without_a_commit_keeps_its_position(timestamp: int | None, *, is_taken: bool) -> None:
    """Fault 8: a `latest` client would begin behind what was written while the gate was closed.

    Of an owner that has not read to the gate nothing is taken away: what is left before it would be skipped.
    """
    topic = Topic(2)
    topic.resize(3)
    topic.ends = {2: 4}
    topic.resize(2)
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    if timestamp is not None:
        assert world.coordinator.awaiting_resets([FOO])
        world.submit(lambda machine: machine.reset_heard(FOO, {1: timestamp, 2: timestamp}, "client", "/host"))
    for _ in range(TIMEOUT_MS // 20_000 + 1):
        world.advance(20_000)
        world.beat("A", epoch)
    epoch = settle(world, "A", epoch)
    assert "foo-2" in assigned(world) and committed(world) == {0: 0}
    topic.ends[0] = 9
    world.set_topics(topic.resize(3))
    topic.ends[2] = 11
    settle(world, "A", epoch)
    if is_taken:
        assert assigned(world) == "foo-0 foo-1" and committed(world) == {0: 0, 2: 4}
    else:
        assert assigned(world) == "foo-0 foo-1 foo-2" and committed(world) == {0: 0}


def re_opened(*, is_heard: bool = False, last: int = 4) -> tuple[Topic, Asking, int]:
    """Foo-2 re-opens under an owner that has committed nothing in it, of which it may be known where it began.

    `last`: the offset before which nothing that can be read is left.
    """
    topic = Topic(2)
    topic.resize(3)
    topic.ends = {2: 4}
    topic.resize(2)
    world = Asking(topic.image())
    world.next_records["foo", 2] = lambda offset: max(offset, last)
    epoch = settle(world, "A", world.join("A").member_epoch)
    if is_heard:
        world.submit(lambda machine: machine.reset_heard(FOO, {1: LATEST, 2: LATEST}, "client", "/host"))
    for _ in range(TIMEOUT_MS // 20_000 + 1):
        world.advance(20_000)
        world.beat("A", epoch)
    epoch = settle(world, "A", epoch)
    assert "foo-2" in assigned(world) and 2 not in committed(world)
    topic.ends[0] = 9
    world.set_topics(topic.resize(3))
    topic.ends[2] = 11
    return topic, world, epoch


def test_a_partition_is_taken_away_as_soon_as_its_owner_commits_it_to_the_gate() -> None:
    """Before, nothing told that it was read: it stayed, and nobody looked at it again."""
    _, world, epoch = re_opened(last=0)
    epoch = settle(world, "A", epoch)
    assert "foo-2" in assigned(world)
    world.commit("A", epoch, 2, 4)
    world.advance(LOOK_MS)
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1" and committed(world)[2] == 4
    world.check()


def test_a_partition_of_which_nothing_can_be_read_before_the_gate_is_taken_away_at_once() -> None:
    _, world, epoch = re_opened(last=4)
    world.advance(LOOK_MS)
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1" and committed(world)[2] == 4
    world.check()


@pytest.mark.parametrize(("is_committed", "offset"), [(True, 8), (False, None)])
def test_what_a_transaction_commits_outlives_that_the_partition_is_taken_away(
    *, is_committed: bool, offset: int | None
) -> None:
    """The gate was written as its position, and overtook what was being committed."""
    _, world, epoch = re_opened(is_heard=True, last=0)
    commit_in_transaction(world, "A", epoch, 2, 8)
    epoch = settle(world, "A", epoch)
    assert "foo-2" in assigned(world)
    world.marker(PRODUCER, committed=is_committed)
    for _ in range(2):
        world.advance(LOOK_MS)
        epoch = settle(world, "A", epoch)
    assert committed(world).get(2) == offset
    assert "foo-2" in assigned(world), "what is committed behind a gate was open once, and a commit begins time anew"
    world.check()


@pytest.mark.parametrize("what", ["nothing", "it fails over", "a transaction is aborted"])
def test_an_owner_whose_time_begins_anew_is_not_taken_for_one_that_began_where_the_log_ends_then(what: str) -> None:
    """It reads from the end, and was handed what came before: taken away at the gate, that was skipped."""
    topic = Topic(2)
    topic.resize(3)
    topic.ends = {2: 4}
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    world.submit(lambda machine: machine.reset_heard(FOO, {0: LATEST, 1: LATEST, 2: LATEST}, "client", "/host"))
    topic.ends = {1: 3, 2: 9}
    world.commit("A", epoch, 1, 3)
    if what == "a transaction is aborted":
        commit_in_transaction(world, "A", epoch, 2, 6)
    world.set_topics(topic.resize(2))
    if what == "a transaction is aborted":
        world.marker(PRODUCER, committed=False)
    epoch = settle(world, "A", epoch)
    if what == "it fails over":
        world.reload()
    for _ in range(TIMEOUT_MS // 20_000 + 2):
        world.advance(20_000)
        world.beat("A", epoch)
    epoch = settle(world, "A", epoch)
    topic.ends[0] = 9
    world.set_topics(topic.resize(3))
    topic.ends[2] = 11
    for _ in range(4):
        world.advance(1_000)
        epoch = settle(world, "A", epoch)
    assert committed(world).get(2, 4) == 4
    world.check()


def unopened(topic: Topic, number: int) -> Image:
    """The topic while the log of a partition cannot be opened, of a shard that has just been loaded."""
    topic.starts[number] = 0  # Where a log start is not known it is told as 0.
    topic.ends.pop(number)
    image = topic.image()
    lineage = Lineage.of_ends(1, topic.counts, topic.cuts, unknown={number: len(topic.cuts)})
    return Image(image.version, {"foo": replace(image.by_name["foo"], lineage=lineage)})


def made_again(topic: Topic) -> None:
    """Foo-1 was removed at its offset 20, and made again."""
    topic.counts, topic.cuts = [1, 2, 1, 2], [{0: 2}, {0: 2}, {0: 5}]
    topic.starts[1], topic.ends = 20, {0: 5, 1: 25}


def test_a_partition_whose_log_is_not_open_waits() -> None:
    """Its position lay behind the log start that was told, so that its gate counted as one that was open once."""
    topic = Topic()
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    topic.ends[0] = 2
    world.commit("A", epoch, 0, 2)
    made_again(topic)
    world.set_topics(topic.image())
    epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0" and committed(world) == {0: 2, 1: 20}
    world.image = unopened(topic, 1)
    world.reload()
    for _ in range(2):
        epoch = settle(world, "A", epoch)
        world.advance(LOOK_MS)
    assert assigned(world) == "foo-0"
    made_again(topic)
    world.set_topics(topic.image())
    for _ in range(2):
        epoch = settle(world, "A", epoch)
        world.advance(LOOK_MS)
    assert assigned(world) == "foo-0"
    world.commit("A", epoch, 0, 5)
    world.advance(LOOK_MS)
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1" and committed(world) == {0: 5, 1: 20}
    world.check()


@pytest.mark.parametrize("has_members", [False, True])
def test_a_group_is_settled_in_a_partition_whose_log_was_not_open_when_it_is(*, has_members: bool) -> None:
    """Its position was written at 0, out of range: what was there was left to the client's reset."""
    topic = Topic()
    topic.ends[0] = 2
    world = Asking(topic.image())
    epoch = world.join("A").member_epoch if has_members else -1
    world.commit("A" if has_members else "", epoch, 0, 2)
    made_again(topic)
    world.set_topics(unopened(topic, 1))
    world.advance(100)
    assert committed(world) == {0: 2}
    made_again(topic)
    world.set_topics(topic.image())
    world.advance(100)
    assert committed(world) == {0: 2, 1: 20}
    world.check()


def test_of_many_partitions_that_are_begun_at_their_ends_some_are_noted() -> None:
    """With each question a group's start is written again, which may be long."""
    topic = Topic(40)
    topic.resize(41)
    world = Asking(topic.image())
    settle(world, "A", world.join("A").member_epoch)
    before = len(world.log)
    for number in range(40):
        world.submit(lambda machine, number=number: machine.reset_heard(FOO, {number: LATEST}, "client", "/host"))
    assert len(world.log) == before + LATEST_MAX
    world.check()


def test_a_partition_taken_away_from_an_owner_that_began_behind_its_closed_gate_waits_for_it() -> None:
    """What was written lay behind the gate, which counted as open once: the partition came back at once."""
    topic = Topic()
    topic.resize(2)
    topic.ends = {0: 5, 1: 3}
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    world.commit("A", epoch, 0, 5)
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1" and committed(world) == {0: 5}
    world.leave("A")
    world.set_topics(topic.resize(1))
    topic.ends[0] = 8
    world.set_topics(topic.resize(2))
    topic.ends[1] = 14
    epoch = settle(world, "B", world.join("B").member_epoch)
    assert assigned(world, "B") == "foo-1"
    world.ask("B", epoch, reports=[(1, 14)])
    epoch = settle(world, "B", epoch)
    assert assigned(world, "B") == "foo-0" and committed(world) == {0: 5, 1: 3}
    world.commit("B", epoch, 0, 8)
    settle(world, "B", epoch)
    assert assigned(world, "B") == "foo-0 foo-1" and committed(world) == {0: 8, 1: 3}
    world.check()


def commit_in_transaction(world: Asking, member: str, epoch: int, partition: int, offset: int) -> None:
    part = TxnOffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
    request = TxnOffsetCommitRequest(
        transactional_id="tx",
        group_id=GROUP,
        member_id=member,
        producer_id=PRODUCER,
        producer_epoch=0,
        generation_id=epoch,
        topics=[TxnOffsetCommitRequestTopic(name="foo", partitions=[part])],
    )
    answer = world.submit(lambda machine: machine.txn_offset_commit(request, Caller(version=3), 1, world.now_ms))
    assert answer.topics[0].partitions[0].error_code == ErrorCode.NONE


def left_in_a_transaction() -> tuple[Topic, Asking, int]:
    """The owner of foo-0 has committed 8 there, and 12 in a transaction that is open, and is gone; B is left."""
    topic = Topic(2)
    world = Asking(topic.image())
    world.join("A")
    world.set_topics(topic.resize(3))
    a = settle(world, "A", 1)
    b = settle(world, "B", world.join("B").member_epoch)
    a = settle(world, "A", a)
    b = settle(world, "B", b)
    topic.ends = {0: 8, 2: 4}
    world.commit("A", a, 0, 8)
    world.set_topics(topic.resize(2))
    topic.ends[0] = 20
    a, b = settle(world, "A", a), settle(world, "B", b)
    world.commit("B", b, 2, 4)
    commit_in_transaction(world, "A", a, 0, 12)
    world.leave("A")
    return topic, world, b


@pytest.mark.parametrize(("is_committed", "offset"), [(True, 12), (False, 8)])
def test_what_a_transaction_commits_outlives_that_the_partition_is_handed_to_another_meanwhile(
    is_committed: bool, offset: int
) -> None:
    """A member that was taken for dead ends its transaction: its records would be processed twice."""
    _, world, b = left_in_a_transaction()
    settle(world, "B", b)
    assert assigned(world, "B") == "foo-0 foo-1 foo-2"
    world.marker(PRODUCER, committed=is_committed)
    assert committed(world)[0] == offset
    world.check()


@pytest.mark.parametrize(("is_committed", "offset"), [(True, 12), (False, 9)])
def test_what_a_transaction_commits_outlives_that_what_was_committed_before_is_deleted(
    *, is_committed: bool, offset: int
) -> None:
    """The next owner's position was written at the log start, and overtook what was being committed."""
    topic, world, b = left_in_a_transaction()
    topic.starts[0] = 9
    for _ in range(4):
        world.advance(LOOK_MS)
        b = settle(world, "B", b)
    assert assigned(world, "B") == "foo-1 foo-2", "whoever has foo-0 is told UNSTABLE_OFFSET_COMMIT anyway"
    world.marker(PRODUCER, committed=is_committed)
    world.advance(LOOK_MS)
    settle(world, "B", b)
    assert assigned(world, "B") == "foo-0 foo-1 foo-2" and committed(world)[0] == offset
    world.check()


@pytest.mark.parametrize(("is_committed", "offset"), [(True, 4), (False, 0)])
def test_a_group_is_settled_in_what_a_transaction_commits_when_that_has_ended(
    *, is_committed: bool, offset: int
) -> None:
    """The log start was written in its turn, and what the transaction had read was read again."""
    topic = Topic()
    topic.ends = {0: 5}
    world = Asking(topic.image())
    for number in range(3 * GROUPS_AT_A_TIME):
        world.join("A", group=f"a{number:03}")
    world.commit("", -1, 0, 3)
    world.set_topics(topic.resize(2))
    topic.ends[1] = 4
    commit_in_transaction(world, "", -1, 1, 4)
    world.advance(100)
    assert committed(world) == {0: 3}
    world.marker(PRODUCER, committed=is_committed)
    world.advance(1)
    assert committed(world) == {0: 3, 1: offset}
    world.check()


@pytest.mark.parametrize(
    "what",
    [
        "it stays",
        "it fails over while the partition waits",
        "it fails over when the gate has opened",
        "it fails over, and the order is given up",
    ],
)
def test_what_is_written_while_a_partition_waits_is_not_lost_where_another_coordinator_takes_over(what: str) -> None:
    """That it waited, and since when, was soft state: what came before the fail-over was left to the client's reset."""
    topic = Topic()
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    world.set_topics(topic.resize(2))
    topic.ends = {0: 0, 1: 5}
    a = settle(world, "A", a)
    world.set_topics(topic.resize(1))
    a = settle(world, "A", a)
    b = world.join("B").member_epoch
    assert "foo-0" in assigned(world) and committed(world) == {1: 0}
    world.leave("A")
    b = settle(world, "B", b)
    topic.ends[0] = 7
    assert assigned(world, "B") == "foo-1", "foo-0 waits for what is left in foo-1"
    if what == "it fails over when the gate has opened":
        world.commit("B", b, 1, 5)
    if what != "it stays":
        world.reload()
    if what == "it fails over, and the order is given up":
        topic.ordered = False
        world.set_topics(topic.image())
    world.advance(LOOK_MS)
    b = settle(world, "B", b)
    world.commit("B", b, 1, 5)
    settle(world, "B", b)
    assert assigned(world, "B") == "foo-0 foo-1" and committed(world) == {0: 0, 1: 5}
    world.check()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("fails_over", [False, True])
def test_what_is_written_between_a_resize_and_the_look_that_finds_a_wait_is_not_lost(
    *, is_late: bool, fails_over: bool
) -> None:
    """The log end of that look was taken for where the wait began; a wide topic is decided by many looks.

    After a fail-over the topic may change between two of them.
    """
    half = 200
    topic = Topic(half)
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    world.set_topics(topic.resize(2 * half))
    world.advance(100)
    a = settle(world, "A", a)
    topic.ends = {half + 150: 5}
    if fails_over:
        world.image = topic.resize(half)
        topic.ends[150] = 7
        world.reload()
        a = world.beat("A", a).member_epoch
    else:
        world.set_topics(topic.resize(half))
    if is_late:
        topic.ends[150] = 7
        world.set_topics(topic.image())
    world.advance(100)
    topic.ends[150] = 7
    b = world.join("B").member_epoch
    world.leave("A")
    b = settle(world, "B", b)
    world.commit("B", b, half + 150, 5)
    for _ in range(3):
        world.advance(LOOK_MS)
        b = settle(world, "B", b)
    assert "foo-150 " in assigned(world, "B") and committed(world)[150] == 0
    world.check()


def test_a_wait_that_began_under_the_classic_protocol_is_not_taken_for_one_that_begins_later() -> None:
    topic = Topic()
    world = Asking(topic.image(), GroupSettings(consumer_migration_policy="bidirectional"))
    joining = world.join_classic("", {"range": subscription("foo")}, version=3)
    world.advance(3_001)
    joined = world.answers[joining] if not hasattr(joining, "member_id") else joining
    member = joined.member_id

    def assign(owned: str, generation: int) -> None:
        handed = SyncGroupRequestAssignment(member_id=member, assignment=assignment(owned))
        world.sync_classic(member, generation, [handed])

    def again() -> int:
        rejoining = world.join_classic(member, {"range": subscription("foo", owned="foo-0 foo-1")}, version=3)
        found = world.answers[rejoining] if not hasattr(rejoining, "member_id") else rejoining
        assign("foo-0 foo-1", found.generation_id)
        return found.generation_id

    assign("foo-0", joined.generation_id)
    world.set_topics(topic.resize(2))
    topic.ends = {0: 0, 1: 5}
    again()
    world.set_topics(topic.resize(1))
    world.ask(member, again(), needs=[(1, -1)], reports=[(0, 0)])
    world.advance(1_000)
    topic.ends[0] = 7
    world.set_topics(topic.image())
    b = world.join("B").member_epoch
    world.advance(1_000)
    world.leave_classic(member)
    b = settle(world, "B", b)
    world.advance(LOOK_MS)
    b = settle(world, "B", b)
    world.commit("B", b, 1, 5)
    world.advance(LOOK_MS)
    settle(world, "B", b)
    assert assigned(world, "B") == "foo-0 foo-1" and committed(world) == {0: 0, 1: 5}


def test_the_waits_of_a_wide_topic_are_known_to_the_coordinator_that_takes_over() -> None:
    """It decides the gates of some partitions before a commit that opens them all."""
    half = 200
    topic = Topic(half)
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    world.set_topics(topic.resize(2 * half))
    topic.ends = {half + 150: 5}
    world.advance(100)
    a = settle(world, "A", a)
    world.set_topics(topic.resize(half))
    world.advance(100)
    settle(world, "A", a)
    b = world.join("B").member_epoch
    world.leave("A")
    world.advance(100)
    b = settle(world, "B", b)
    assert "foo-150 " not in assigned(world, "B")
    topic.ends[150] = 7
    world.reload()
    world.commit("B", b, half + 150, 5)
    world.advance(100)
    settle(world, "B", b)
    assert "foo-150 " in assigned(world, "B") and committed(world)[150] == 0
    world.check()


def test_nothing_waits_any_more_when_the_order_of_a_topic_is_no_longer_kept() -> None:
    """The verdicts of before were used for ever: the partition was handed out and taken away in turn."""
    topic = Topic()
    world = Asking(topic.image())
    epoch = world.join("A").member_epoch
    topic.ends = {0: 5, 1: 0}
    world.commit("A", epoch, 0, 5)
    world.set_topics(topic.resize(2))
    epoch = settle(world, "A", epoch)
    topic.ends[1] = 3
    world.commit("A", epoch, 1, 3)
    world.set_topics(topic.resize(1))
    epoch = settle(world, "A", epoch)
    topic.ends[0] = 8
    world.set_topics(topic.resize(2))
    epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0", "foo-1 waits for what was written to foo-0 meanwhile"
    topic.ordered = False
    world.set_topics(topic.image())
    for _ in range(6):
        epoch = settle(world, "A", epoch)
        assert assigned(world) == "foo-0 foo-1"
        world.advance(LOOK_MS)
    gates = world.coordinator.keeper.known(GROUP)
    assert gates is not None and not gates.evaluated and not gates.taking
    world.check()


def test_a_partition_that_is_to_be_taken_away_stays_when_the_order_of_its_topic_is_no_longer_kept() -> None:
    """The heartbeat of its owner failed for ever."""
    topic = Topic(2)
    topic.resize(3)
    topic.ends = {2: 4}
    topic.resize(2)
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    world.submit(lambda machine: machine.reset_heard(FOO, {1: LATEST, 2: LATEST}, "client", "/host"))
    for _ in range(TIMEOUT_MS // 20_000 + 1):
        world.advance(20_000)
        world.beat("A", epoch)
    epoch = settle(world, "A", epoch)
    topic.ends[0] = 9
    world.set_topics(topic.resize(3))
    topic.ends[2] = 11
    world.advance(10)
    gates = world.coordinator.keeper.known(GROUP)
    assert gates is not None and gates.taking
    topic.ordered = False
    world.set_topics(topic.image())
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1 foo-2"
    world.check()


def test_a_removed_partition_that_is_made_again_appeared_later() -> None:
    topic = Topic()
    topic.resize(3)
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    assert committed(world) == {}
    topic.counts, topic.cuts = [1, 3, 2], [*topic.cuts, {0: 0, 1: 0}]
    gone = topic.image().by_name["foo"]
    world.set_topics(Image(topic.version, {"foo": replace(gone, retiring=())}))
    topic.starts[2] = topic.ends[2] = 20
    world.set_topics(topic.resize(3))
    settle(world, "A", epoch)
    assert committed(world) == {2: 20}


def test_a_group_that_is_deleted_leaves_nothing() -> None:
    topic = Topic()
    topic.resize(2)
    world = Asking(topic.image())
    world.join("A")
    world.leave("A")
    assert world.coordinator.starts.get(GROUP, FOO) is not None
    assert world.submit(lambda machine: machine.delete_group(GROUP, world.now_ms)) is ErrorCode.NONE
    assert world.coordinator.starts.get(GROUP, FOO) is None
    world.check()


def test_a_group_that_comes_back_begins_partitions_that_appeared_meanwhile_at_their_log_start() -> None:
    topic = Topic()
    world = Asking(topic.image())
    world.join("A")
    world.leave("A")
    world.set_topics(topic.resize(2))
    topic.ends[1] = 7
    world.reload(compact=True)
    settle(world, "B", world.join("B").member_epoch)
    assert committed(world) == {1: 0}
    world.check()


def test_a_group_that_subscribes_again_begins_partitions_that_appeared_meanwhile_at_their_log_start() -> None:
    topic = Topic()
    world = Asking(topic.image())
    epoch = world.join("A").member_epoch
    epoch = world.beat("A", epoch, topics=["bar"]).member_epoch
    world.set_topics(topic.resize(2))
    topic.ends[1] = 7
    world.beat("A", epoch, topics=["foo"])
    assert committed(world) == {1: 0}
    world.check()


def test_beginnings_without_a_group_and_positions_are_forgotten() -> None:
    topic = Topic()
    world = Asking(topic.image())
    world.commit("", -1, 0, 3)
    world.set_topics(topic.resize(2))
    part = [OffsetDeleteRequestPartition(partition_index=number) for number in range(2)]
    request = OffsetDeleteRequest(group_id=GROUP, topics=[OffsetDeleteRequestTopic(name="foo", partitions=part)])
    world.submit(lambda machine: machine.offset_delete(request, world.now_ms))
    assert committed(world) == {} and world.coordinator.starts.get(GROUP, FOO) is not None
    world.reload()
    world.advance(world.settings.offsets_retention_check_interval_ms)
    assert world.coordinator.starts.get(GROUP, FOO) is None
    world.check()


def test_a_classic_group_begins_new_partitions_at_their_log_start() -> None:
    topic = Topic()
    world = Asking(topic.image())
    joining = world.join_classic("", {"range": subscription("foo")}, version=3)
    world.advance(3_001)
    joined = world.answers[joining] if not hasattr(joining, "member_id") else joining
    handed = SyncGroupRequestAssignment(member_id=joined.member_id, assignment=assignment("foo-0"))
    world.sync_classic(joined.member_id, joined.generation_id, [handed])
    world.set_topics(topic.resize(2))
    assert committed(world) == {1: 0}
    world.check()


def test_a_transaction_that_commits_is_looked_at_at_once() -> None:
    """Its marker is no decision of the group, and gates opened at the next look that was due anyway."""
    topic = Topic()
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    topic.ends[0] = 5
    world.set_topics(topic.resize(2))
    a = settle(world, "A", a)
    b = world.join("B").member_epoch
    commit_in_transaction(world, "A", a, 0, 5)
    ticket = world.ask("B", b, needs=[(0, 0)])
    world.advance(LOOK_MS // 2)
    assert isinstance(ticket, int) and ticket not in world.answers
    world.marker(PRODUCER, committed=True)
    world.advance(0)
    assert ticket in world.answers


def test_a_transaction_that_commits_many_offsets_is_looked_at_some_at_a_time() -> None:
    """All of them in one look took 200 ms for 5,000."""
    count = 3 * LOOKED_AT_MAX
    topic = Topic(count)
    topic.ends = dict.fromkeys(range(count), 5)
    world = Asking(topic.image())
    a = settle(world, "A", world.join("A").member_epoch)
    world.set_topics(topic.resize(2 * count))
    a = settle(world, "A", a)
    for _ in range(20):
        world.advance(LOOK_MS)
    for number in range(count):
        commit_in_transaction(world, "A", a, number, 5)
    keeper = world.coordinator.keeper
    world.log.append((b"", b"1", PRODUCER))
    world.coordinator.apply_marker(PRODUCER, 0, True)
    gates = keeper.known(GROUP)
    assert gates is not None and len(gates.touched) == count
    stood: list[int] = []
    stand = Standing.passed

    def passed(standing: Standing, topic: TopicImage, partition: int, raw: int, owner: Owner) -> int:
        stood.append(partition)
        return stand(standing, topic, partition, raw, owner)

    with mock.patch.object(Standing, "passed", passed):
        decide_look(keeper, GROUP, world.now_ms)
    assert 0 < len(stood) <= 5 * LOOKED_AT_MAX and len(gates.touched) == count - LOOKED_AT_MAX
    world.submit(lambda machine: machine.marked(PRODUCER, world.now_ms))
    for _ in range(50):
        world.advance(LOOK_ON_MS)
    assert not gates.touched and not gates.evaluated[FOO].closed


def test_a_topic_that_nobody_subscribes_to_any_more_is_not_looked_at() -> None:
    """A position in it that moved was never decided upon, and the group was looked at every 2 ms while it lived."""
    topic = Topic()
    world = Asking(topic.image())
    world.join("B", topics=["bar"])
    a = settle(world, "A", world.join("A").member_epoch)
    topic.ends[0] = 5
    world.set_topics(topic.resize(2))
    a = settle(world, "A", a)
    commit_in_transaction(world, "A", a, 1, 3)
    world.leave("A")
    world.marker(PRODUCER, committed=True)
    looks = 0
    for _ in range(50):
        looks += world.timers.get(("gates", GROUP), NEVER) <= world.now_ms + 2
        world.advance(2)
    assert looks < 10
