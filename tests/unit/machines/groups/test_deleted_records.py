"""Records that are deleted while their owner may still hand them out: what waits for them waits for the owner."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from tests.support.groups import GROUP
from tests.unit.machines.groups.test_positions_asked import Asking, settle
from tests.unit.machines.groups.test_starts import TIMEOUT_MS, Topic, assigned, committed

STEP_MS = 20_000


def waiting(*, begins: int = 0, commits: int = -1) -> tuple[Asking, Topic, int]:
    """A owns partition 0 from `begins` on, and has committed `commits` of five records; partition 1 waits for these."""
    topic = Topic()
    topic.ends[0], topic.starts[0] = begins + 5, begins
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    if commits >= 0:
        world.commit("A", epoch, 0, begins + commits)
    world.set_topics(topic.resize(2))
    topic.ends = {0: begins + 8, 1: 4}
    epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0"
    return world, topic, epoch


def delete(world: Asking, topic: Topic, offset: int) -> None:
    topic.starts[0] = offset
    world.set_topics(topic.image())
    world.advance(1_000)


@pytest.mark.parametrize("commits", [-1, 2])
@pytest.mark.parametrize("begins", [0, 10])
def test_what_an_owner_may_have_fetched_before_it_was_deleted_is_not_read(begins: int, commits: int) -> None:
    world, topic, epoch = waiting(begins=begins, commits=commits)
    delete(world, topic, begins + 6)
    epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0", "A may still hand out the records before the gate"
    world.commit("A", epoch, 0, begins + 6)
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1"
    world.check()


def test_the_report_of_an_owner_of_ours_says_that_it_has_none_of_them() -> None:
    world, topic, epoch = waiting(commits=2)
    delete(world, topic, 6)
    world.ask("A", epoch, reports=[(0, 2)])
    epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0"
    world.ask("A", epoch, reports=[(0, 6)])
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1"


def test_a_member_that_waits_is_told_only_what_the_owner_has_passed() -> None:
    world, topic, epoch = waiting(commits=2)
    joined = world.join("B").member_epoch
    assert world.told_of(world.ask("B", joined, needs=[(0, -1)])) == [(0, False, 2, False)]
    delete(world, topic, 6)
    ticket = world.ask("B", joined, needs=[(0, 2)])
    world.advance(1_000)
    assert isinstance(ticket, int) and ticket not in world.answers
    world.commit("A", epoch, 0, 6)
    world.advance(1_000)
    assert world.answers[ticket].error_code == ErrorCode.REBALANCE_IN_PROGRESS, "B may have what waited"


def test_an_owner_that_was_given_the_partition_after_the_deletion_has_none_of_them() -> None:
    world, topic, _ = waiting(commits=2)
    delete(world, topic, 6)
    world.leave("A")
    settle(world, "B", world.join("B").member_epoch)
    assert assigned(world, "B") == "foo-0 foo-1" and committed(world) == {0: 2, 1: 0}


def test_an_owner_that_says_nothing_for_its_time_holds_up_nobody() -> None:
    """One that commits by hand, and has begun behind what was deleted, has nothing to commit."""
    world, topic, epoch = waiting(commits=2)
    delete(world, topic, 6)
    for _ in range(TIMEOUT_MS // STEP_MS - 1):
        world.advance(STEP_MS)
        epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0"
    for _ in range(3):
        world.advance(STEP_MS)
        epoch = settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1"


def test_nothing_is_kept_of_a_member_that_has_left() -> None:
    world, _, _ = waiting(begins=10)
    gates = world.coordinator.keeper.known(GROUP)
    assert gates is not None and [given.owner for given in gates.standing.given.values()] == ["A"]
    world.join("B")
    world.leave("A")
    assert not gates.standing.given


def test_what_the_leader_told_before_the_deletion_says_that_the_owner_has_none_of_them() -> None:
    """What follows the commit was a marker: that it was deleted, too, closed the gate again, for the owner's time."""
    topic = Topic()
    topic.ends[0] = 5
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    world.set_topics(topic.resize(2))
    epoch = settle(world, "A", epoch)
    joined = world.join("B").member_epoch
    world.next_records["foo", 0] = lambda offset: max(offset, 5 if offset >= 4 else offset)
    world.commit("A", epoch, 0, 4)
    delete(world, topic, 5)
    settle(world, "A", epoch)
    joined = settle(world, "B", joined)
    assert assigned(world, "B") == "foo-1"
    topic.ends[0] = 8
    delete(world, topic, 7)
    assert world.told_of(world.ask("B", joined, needs=[(0, -1)], wait_ms=0)) == [(0, False, 5, False)], (
        "it may hold more"
    )


@pytest.mark.parametrize("returns_as", ["A", "A2"])
def test_an_owner_that_joins_again_has_none_of_them(returns_as: str) -> None:
    """It keeps its partitions: a static member that comes back, and one that begins anew under its id."""
    topic = Topic()
    topic.ends[0] = 5
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A", instance_id="i").member_epoch)
    world.commit("A", epoch, 0, 2)
    world.set_topics(topic.resize(2))
    topic.ends = {0: 8, 1: 4}
    epoch = settle(world, "A", epoch)
    if returns_as != "A":
        world.beat("A", -2, instance_id="i")
    delete(world, topic, 6)
    settle(world, returns_as, world.join(returns_as, instance_id="i").member_epoch)
    assert assigned(world, returns_as) == "foo-0 foo-1"
