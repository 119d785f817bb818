"""Records that compaction drops while their owner may still hand them out: what waits for them waits for the owner."""

from __future__ import annotations

import pytest

from anabranch.machines.groups.gates import Evaluated, Stand, can_go_on
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.standing import Answer, Standing
from anabranch.machines.lineage import Lineage
from anabranch.machines.progress import Rewritten
from tests.unit.machines.groups.test_positions_asked import FOO, Asking, classic_generation, settle
from tests.unit.machines.groups.test_starts import TIMEOUT_MS, Topic, assigned

STEP_MS = 20_000


class Compacted(Asking):
    """A owns partition 0 and has committed two of five records; partition 1 waits for the others."""

    def __init__(self, *, end: int = 5) -> None:
        self.topic = Topic()
        self.topic.ends[0] = end
        super().__init__(self.topic.image())
        self.epoch = settle(self, "A", self.join("A").member_epoch)
        self.commit("A", self.epoch, 0, 2)
        self.set_topics(self.topic.resize(2))
        self.topic.ends = {0: end, 1: 4}
        self.beat_a()
        assert assigned(self) == "foo-0"

    def beat_a(self) -> None:
        self.epoch = settle(self, "A", self.epoch)

    def rewrite(self, to: int, stamp: int = 2) -> None:
        """The cleaner drops all records from offset 2 on that lie below `to`."""
        self.topic.rewritten[0] = Rewritten(stamp, to)
        self.next_records["foo", 0] = lambda offset: max(offset, to) if offset >= 2 else offset
        self.advance(1_000)
        self.beat_a()


def test_what_an_owner_may_have_fetched_before_it_was_dropped_is_not_read() -> None:
    world = Compacted()
    world.rewrite(5)
    assert assigned(world) == "foo-0", "A may still hand out the records before the gate"
    world.commit("A", world.epoch, 0, 5)
    world.beat_a()
    assert assigned(world) == "foo-0 foo-1"
    world.check()


def test_what_the_leader_passed_over_before_was_never_a_record() -> None:
    """Markers and aborted records lie behind the commit; the cleaner comes later, and drops them, too."""
    world = Compacted()
    world.next_records["foo", 0] = lambda offset: max(offset, 5) if offset >= 2 else offset
    world.beat_a()
    world.advance(1_000)
    world.rewrite(5)
    assert assigned(world) == "foo-0 foo-1"


def test_what_the_leader_passes_over_above_all_that_was_rewritten_was_never_a_record() -> None:
    world = Compacted()
    world.topic.rewritten[0] = Rewritten(2, 2)
    world.next_records["foo", 0] = lambda offset: max(offset, 5) if offset >= 2 else offset
    world.advance(1_000)
    world.beat_a()
    assert assigned(world) == "foo-0 foo-1"


def test_an_answer_that_is_sure_counts_though_one_before_it_was_not() -> None:
    """The owner commits behind what may have been dropped of its records; a marker is left, which nothing dropped."""
    world = Compacted()
    world.topic.rewritten[0] = Rewritten(2, 4)
    world.next_records["foo", 0] = lambda offset: max(offset, 5) if offset >= 2 else offset
    world.advance(1_000)
    world.beat_a()
    assert assigned(world) == "foo-0"
    world.commit("A", world.epoch, 0, 4)
    for _ in range(3):
        world.beat_a()
        world.advance(1_000)
    assert assigned(world) == "foo-0 foo-1"


def test_what_was_let_go_and_what_never_was_a_record_meet() -> None:
    """A marker lies behind what the owner has flushed. Its leader was asked about the one and the other without end."""
    world = Compacted()
    asked: list[int] = []

    def next_record(offset: int) -> int:
        asked.append(offset)
        assert len(asked) < 10, asked
        return max(offset, 5) if offset >= 2 else offset

    world.topic.rewritten[0] = Rewritten(2, 4)
    world.next_records["foo", 0] = next_record
    world.ask("A", world.epoch, flushed=[(0, 4)])
    for _ in range(3):
        world.advance(1_000)
        world.beat_a()
    assert assigned(world) == "foo-0 foo-1"


def test_a_sure_answer_is_no_longer_one_when_more_is_passed_over_behind_it() -> None:
    standing, at = Standing(), (FOO, 0)
    standing.answered(at, 2, 5, 9, Rewritten(2, 4))
    standing.answered(at, 4, 5, 9, Rewritten(2, 4))
    assert standing.answers[at] == Answer(2, 5, 9, 2, 2, 4)
    standing.answered(at, 5, 7, 9, Rewritten(3, 9))
    assert standing.answers[at] == Answer(2, 7, 9, 2, 3)
    standing.answered(at, 7, 8, 9, Rewritten(4, 6))
    assert standing.answers[at] == Answer(2, 8, 9, 2, 3, 7)
    standing.answered(at, 8, 9, 9, Rewritten(4, 6))
    assert standing.answers[at] == Answer(2, 9, 9, 2, 3, 7)


def test_an_owner_that_was_given_the_partition_after_the_rewriting_has_none_of_them() -> None:
    world = Compacted()
    world.rewrite(5)
    world.leave("A")
    settle(world, "B", world.join("B").member_epoch)
    assert assigned(world, "B") == "foo-0 foo-1"


def test_an_owner_that_was_given_the_partition_between_two_rewritings_may_have_what_the_second_dropped() -> None:
    world = Compacted()
    world.rewrite(4)
    world.leave("A")
    epoch = settle(world, "B", world.join("B").member_epoch)
    world.topic.rewritten[0] = Rewritten(3, 5)
    world.next_records["foo", 0] = lambda offset: max(offset, 5) if offset >= 2 else offset
    world.advance(1_000)
    epoch = settle(world, "B", epoch)
    assert assigned(world, "B") == "foo-0"
    world.commit("B", epoch, 0, 5)
    settle(world, "B", epoch)
    assert assigned(world, "B") == "foo-0 foo-1"


@pytest.mark.parametrize(("flushed", "opens"), [(4, False), (5, True), (50, False)])
def test_a_member_of_ours_tells_that_it_holds_none_of_them_though_it_has_not_committed(
    flushed: int, opens: bool
) -> None:
    """One that tells of more than there is cannot be right."""
    world = Compacted()
    world.rewrite(5)
    world.ask("A", world.epoch, flushed=[(0, flushed)])
    world.advance(1_000)
    world.beat_a()
    assert assigned(world) == ("foo-0 foo-1" if opens else "foo-0")


def test_a_member_that_goes_back_may_hold_what_it_had_let_go() -> None:
    """It has rolled back, and fetched again what the group has not committed."""
    world = Compacted()
    world.topic.rewritten[0] = Rewritten(1, 0)
    world.ask("A", world.epoch, flushed=[(0, 5)])
    world.ask("A", world.epoch, flushed=[(0, 2)])
    world.rewrite(5)
    assert assigned(world) == "foo-0"


def test_a_classic_member_may_hold_again_what_it_let_go_in_an_earlier_generation() -> None:
    topic = Topic()
    topic.ends[0] = 5
    world = Asking(topic.image())
    member, generation = classic_generation(world)
    world.commit(member, generation, 0, 2)
    world.set_topics(topic.resize(2))
    topic.ends = {0: 5, 1: 4}
    member, generation = classic_generation(world, member, "foo-0 foo-1")
    world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
    world.ask(member, generation, flushed=[(0, 5)], wait_ms=0)
    member, generation = classic_generation(world, member, "foo-0 foo-1")
    topic.rewritten[0] = Rewritten(2, 5)
    world.next_records["foo", 0] = lambda offset: max(offset, 5) if offset >= 2 else offset
    for _ in range(3):
        world.advance(1_000)
        answer = world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
    assert world.told_of(answer) == [(0, False, 2, False)]
    world.ask(member, generation, flushed=[(0, 5)], wait_ms=0)
    answer = world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
    assert world.told_of(answer) == [(0, False, 5, False)]


def test_what_a_former_owner_held_is_not_asked_of_the_next_one() -> None:
    world = Compacted()
    world.ask("A", world.epoch, flushed=[(0, 5)])
    joined = world.join("B").member_epoch
    world.leave("A")
    epoch = settle(world, "B", joined)
    assert assigned(world, "B") == "foo-0"
    world.topic.rewritten[0] = Rewritten(2, 5)
    world.next_records["foo", 0] = lambda offset: max(offset, 5) if offset >= 2 else offset
    world.advance(1_000)
    settle(world, "B", epoch)
    assert assigned(world, "B") == "foo-0", "B has fetched anew what A had handed out"


def test_an_owner_that_says_nothing_for_its_time_holds_up_nobody() -> None:
    """One that commits by hand, and has fetched nothing of what was dropped, has nothing to commit."""
    world = Compacted()
    world.rewrite(5)
    world.topic.ends[0] = 8
    world.set_topics(world.topic.image())
    for _ in range(TIMEOUT_MS // STEP_MS - 1):
        world.advance(STEP_MS)
        world.beat_a()
    assert assigned(world) == "foo-0"
    for _ in range(3):
        world.advance(STEP_MS)
        world.beat_a()
    assert assigned(world) == "foo-0 foo-1"


def test_the_time_of_an_owner_counts_for_what_it_may_hold_before_a_closed_gate_of_its_partition() -> None:
    """A partition that came back may wait for another which waits for what was dropped of it: nothing moved for ever.

    Seed 1443093 of the lives of groups is such a one: a member of a classic group has both partitions.
    """
    topic = TopicImage(FOO, "foo", (0, 1), lineage=Lineage.of_ends(1, (1, 2), ({0: 5},)), stable_end=lambda _: 8)
    made = Evaluated(topic)
    made.decide([1], lambda _: Stand(0, 2, 0, 0, None))
    assert 1 in made.closed
    assert [can_go_on(topic, made, 1, position) for position in (0, 1, 2)] == [True, True, False]
    assert [can_go_on(topic, made, 0, position) for position in (7, 8)] == [True, False]
