"""For how long a gate waits for an owner: its time counts while it can go on, and as far as it is known to be alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.lineage import Lineage
from anabranch.protocol.messages.join_group import JoinGroupResponse
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment
from tests.support.groups import assignment, subscription
from tests.unit.machines.groups.test_positions_asked import FOO, TIMEOUT_MS, Asking, classic_group, grown, settle

STEP_MS = 10_000
END, BACKLOG = 10, 50
"""Where partition 0 ends in the layout of one partition, and what is left to read of partition 1 before that."""


def image_of(version: int, *counts: int, before: int = 0, stable: Callable[[int], int] = lambda _: 100) -> Image:
    """Topic foo with one partition at its creation: `BACKLOG` records in partition 1, then `END` in partition 0.

    `before`: the records of partition 0 that are as old as the backlog.
    """
    ends = [{0: before, 1: BACKLOG}, {0: before + END, 1: BACKLOG}][: len(counts) - 1]
    lineage = Lineage.of_ends(1, counts, ends) if ends else Lineage.flat(counts[0])
    topic = TopicImage(FOO, "foo", range(counts[-1]), range(counts[-1], 2), lineage, lambda _: 0, lambda _: 100, 1)
    return Image(version, {"foo": replace(topic, stable_end=stable)})


def passes(world: Asking, seconds: int, **epochs: int) -> None:
    """Let time pass while these members beat."""
    for _ in range(1_000 * seconds // STEP_MS):
        world.advance(STEP_MS)
        for member, epoch in epochs.items():
            world.beat(member, epoch)


def has(world: Asking, member: str, partition: int) -> bool:
    return f"foo-{partition}" in world.named(world.group.members[member].assigned).split()


def test_the_time_of_an_owner_does_not_count_while_its_records_wait_at_a_gate_themselves() -> None:
    """Two partitions became one, then four: 2 waits for the end of 0, and 0 for all of 1, which takes long."""
    world = Asking(image_of(1, 2))
    a = world.join("A").member_epoch
    b = world.join("B").member_epoch
    for _ in range(2):
        a, b = settle(world, "A", a), settle(world, "B", b)
    first, second = ("A", "B") if has(world, "A", 0) else ("B", "A")
    assert has(world, first, 0) and has(world, second, 1)
    world.set_topics(image_of(2, 2, 1))
    world.set_topics(image_of(3, 2, 1, 4))
    for _ in range(2):
        a, b = settle(world, "A", a), settle(world, "B", b)
    epochs = {"A": a, "B": b}
    world.commit(first, epochs[first], 0, 0)
    for read in range(5, BACKLOG, 5):
        world.commit(second, epochs[second], 1, read)
        passes(world, 30, **epochs)
        assert not has(world, "A", 2) and not has(world, "B", 2), "nobody was given the records that 2 waits for"
    world.commit(second, epochs[second], 1, BACKLOG)
    passes(world, TIMEOUT_MS // 1_000 - 20, **epochs)
    assert not has(world, "A", 2) and not has(world, "B", 2)
    passes(world, 40, **epochs)
    assert has(world, "A", 2) or has(world, "B", 2)


@pytest.mark.parametrize("is_ours", [True, False])
def test_records_behind_an_own_gate_do_not_count_by_time_with_those_before_it(is_ours: bool) -> None:
    """The application keeps two of five records uncommitted; what comes behind them it is given much later.

    A stock consumer stops at no gate within a partition: it was given all.
    """
    world = Asking(image_of(1, 2))
    epochs = {"A": world.join("A").member_epoch, "B": world.join("B").member_epoch}

    def settled() -> None:
        for _ in range(2):
            epochs.update({name: settle(world, name, epoch) for name, epoch in epochs.items()})

    settled()
    first, second = ("A", "B") if has(world, "A", 0) else ("B", "A")
    world.set_topics(image_of(2, 2, 1, before=5))
    world.set_topics(image_of(3, 2, 1, 4, before=5))
    settled()
    if is_ours:
        world.ask(first, epochs[first], needs=[(1, -1)], wait_ms=0)
    world.commit(first, epochs[first], 0, 3)
    for read in range(5, BACKLOG, 5):
        world.commit(second, epochs[second], 1, read)
        passes(world, 30, **epochs)
    world.commit(second, epochs[second], 1, BACKLOG)
    passes(world, TIMEOUT_MS // 1_000 - 20, **epochs)
    if is_ours:
        assert not has(world, "A", 2) and not has(world, "B", 2), "its time for what is behind its gate is not over"
    passes(world, 40 if is_ours else 0, **epochs)
    assert has(world, "A", 2) or has(world, "B", 2)


def test_a_gate_that_waits_for_records_that_came_later_waits_again() -> None:
    """The first gate has opened by time, and the position stands still: of records 5 to 8 nobody has had the time.

    Afterwards all that was there counts, also for a third gate.
    """
    world = Asking(written(1, [1], []))
    epochs = {"A": world.join("A").member_epoch, "B": world.join("B").member_epoch}

    def settled() -> None:
        for _ in range(3):
            epochs.update({name: settle(world, name, epoch) for name, epoch in epochs.items()})

    settled()
    owner = "A" if has(world, "A", 0) else "B"
    world.commit(owner, epochs[owner], 0, 3)
    world.set_topics(written(2, [1, 2], [{0: 5}]))
    passes(world, TIMEOUT_MS // 1_000 + 30, **epochs)
    assert has(world, "A", 1) or has(world, "B", 1)
    settled()
    world.set_topics(written(3, [1, 2, 4], [{0: 5}, {0: 9, 1: 0}]))
    settled()
    passes(world, 20, **epochs)
    world.set_topics(written(4, [1, 2, 4, 5], [{0: 5}, {0: 9, 1: 0}, {0: 12, 1: 0, 2: 0, 3: 0}]))
    settled()
    passes(world, TIMEOUT_MS // 1_000 - 30, **epochs)
    assert not has(world, "A", 2) and not has(world, "B", 2), "the time of the first gate opened the second"
    passes(world, 30, **epochs)
    assert has(world, "A", 2) or has(world, "B", 2)
    assert not has(world, "A", 4) and not has(world, "B", 4), "the time of the second gate opened the third"
    settled()
    passes(world, TIMEOUT_MS // 1_000 + 10, **epochs)
    assert has(world, "A", 4) or has(world, "B", 4)


def written(version: int, counts: list[int], ends: list[dict[int, int]]) -> Image:
    """Topic foo with one partition at its creation; partition 0 ends where its last layout did."""
    lineage = Lineage.of_ends(1, counts, ends) if ends else Lineage.flat(1)
    end = ends[-1][0] if ends else 5
    topic = TopicImage(FOO, "foo", range(counts[-1]), (), lineage, lambda _: 0, lambda n: end if n == 0 else 0, 1)
    return Image(version, {"foo": topic})


def test_of_a_classic_member_neither() -> None:
    """It is told how far its positions count by time, which is not as far as others need."""
    world = Asking(image_of(1, 2))
    member, generation = classic_group(world)
    world.set_topics(image_of(3, 2, 1, 4, before=5))

    def told(read: int, seconds: int) -> int:
        world.commit(member, generation, 1, read)
        for _ in range(seconds):
            world.advance(1_000)
            world.beat_classic(member, generation)
        return world.by_time_of(world.ask(member, generation, needs=[(0, -1)], wait_ms=0))[0]

    world.commit(member, generation, 0, 3)
    told(1, 0)
    assert {told(read, 30) for read in range(5, BACKLOG, 5)} == {-1, 5}
    assert told(BACKLOG, TIMEOUT_MS // 1_000 - 20) == 5, "the time for what is behind its gate is not over"
    assert told(BACKLOG, 40) == 100, "all records that were there when its time began"


def test_of_a_classic_owner_neither() -> None:
    world = Asking(image_of(1, 2))
    member, generation = classic_group(world)
    world.set_topics(image_of(3, 2, 1, 4))

    def passes(read: int, seconds: int) -> bool:
        """Commit in partition 1, let time pass; whether partition 0 is said to be overdue."""
        world.commit(member, generation, 1, read)
        for _ in range(seconds):
            world.advance(1_000)
            world.beat_classic(member, generation)
        answer = world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
        return world.told_of(answer)[0][3]

    for read in range(5, BACKLOG, 5):
        assert not passes(read, 30), "nobody was given the records of partition 0"
    assert not passes(BACKLOG, TIMEOUT_MS // 1_000 - 20)
    assert passes(BACKLOG, 40)


def test_the_time_of_a_classic_owner_begins_when_its_generation_is_handed_out() -> None:
    """A member that joined again counted as owner during the rebalance, too: gates opened before its time was over."""
    world = Asking(image_of(1, 2))
    member, generation = classic_group(world)
    world.ask(member, generation, reports=[(0, 0)], needs=[(0, -1)], wait_ms=0)
    reads = {"range": subscription("foo")}
    waiting = world.join_classic("", reads, version=3, fresh="other")
    for _ in range(40):
        world.advance(1_000)
        world.beat_classic(member, generation)
    joining = world.join_classic(member, reads, version=3)
    joined = joining if isinstance(joining, JoinGroupResponse) else world.answers[joining]
    assert joined.leader == member and joined.generation_id > generation
    handed = SyncGroupRequestAssignment(member_id=member, assignment=assignment("foo-0"))
    world.sync_classic(member, joined.generation_id, [handed])
    assert isinstance(waiting, int)
    other = world.answers[waiting].member_id
    world.sync_classic(other, joined.generation_id)

    def is_overdue_after(seconds: int) -> bool:
        for _ in range(seconds):
            world.advance(1_000)
            world.beat_classic(member, joined.generation_id)
            world.beat_classic(other, joined.generation_id)
        answer = world.ask(member, joined.generation_id, needs=[(0, -1)], wait_ms=0)
        return world.told_of(answer)[0][3]

    assert not is_overdue_after(TIMEOUT_MS // 1_000 - 5)
    assert is_overdue_after(10)


def test_the_time_of_an_owner_that_joins_again_under_its_id_begins_anew() -> None:
    """The next look saw the same owner and position as the one before, and opened the gate too early."""
    world = Asking(image_of(1, 2, 1))
    a = world.join("A").member_epoch
    for _ in range(2):
        a = settle(world, "A", a)
    assert has(world, "A", 1) and not has(world, "A", 0)
    world.commit("A", a, 1, 5)
    passes(world, TIMEOUT_MS // 1_000 - 20, A=a)
    a = settle(world, "A", world.join("A").member_epoch)
    passes(world, TIMEOUT_MS // 1_000 - 20, A=a)
    assert has(world, "A", 1) and not has(world, "A", 0)
    passes(world, 40, A=a)
    assert has(world, "A", 0)


def test_the_time_of_a_classic_owner_goes_on_after_a_rebalance() -> None:
    """A member that came and went every 40 s had it begin anew with each generation, and no gate opened by time."""
    world = Asking(image_of(1, 2))
    member, generation = classic_group(world)
    world.ask(member, generation, reports=[(0, 0)], needs=[(0, -1)], wait_ms=0)
    reads = {"range": subscription("foo")}
    handed = SyncGroupRequestAssignment(member_id=member, assignment=assignment("foo-0"))
    began_ms = world.now_ms

    def is_overdue() -> bool:
        for _ in range(20):
            world.advance(1_000)
            world.beat_classic(member, generation)
        answer = world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
        return world.told_of(answer)[0][3]

    def rejoin() -> int:
        world.advance(1_000)
        joining = world.join_classic(member, reads, version=3)
        joined = joining if isinstance(joining, JoinGroupResponse) else world.answers[joining]
        world.sync_classic(member, joined.generation_id, [handed])
        return joined.generation_id

    for number in range(3):
        other = world.join_classic("", reads, version=3, fresh=f"other{number}")
        generation = rejoin()
        assert isinstance(other, int)
        world.sync_classic(world.answers[other].member_id, generation)
        if is_overdue():
            break
        world.leave_classic(world.answers[other].member_id)
        generation = rejoin()
        if is_overdue():
            break
    assert TIMEOUT_MS <= world.now_ms - began_ms <= TIMEOUT_MS + 30_000


@pytest.mark.parametrize("rebalance_s", [0, 8, 12, 40])
@pytest.mark.parametrize("has_committed", [False, True])
def test_the_time_of_a_classic_owner_counts_none_of_a_rebalance_in_which_nobody_asks(
    rebalance_s: int, has_committed: bool
) -> None:
    """Questions end with it. What was known of the owner was dropped after 10 s of it, or its time went on."""
    world = Asking(image_of(1, 2))
    reads = {"range": subscription("foo")}
    joins = [world.join_classic("", reads, version=3, fresh=name, session_timeout_ms=300_000) for name in "ab"]
    world.advance(6_001)
    stock, ours = (world.answers[join] for join in joins)
    members = stock.member_id, ours.member_id
    handed = [
        SyncGroupRequestAssignment(member_id=member_id, assignment=assignment(owned))
        for member_id, owned in zip(members, ("foo-1", "foo-0"), strict=True)
    ]

    def synced(joined: JoinGroupResponse) -> int:
        for member_id in sorted(members, key=lambda member_id: member_id == joined.leader):
            world.sync_classic(member_id, joined.generation_id, handed if member_id == joined.leader else [])
        return joined.generation_id

    generation = synced(stock)
    world.set_topics(image_of(2, 2, 1, before=5))
    if has_committed:
        world.commit(members[0], generation, 1, 3)

    def counts(seconds: int) -> bool:
        """Whether the owner's position counts by time within so many seconds."""
        for _ in range(seconds):
            asked = world.ask(members[1], generation, needs=[(1, 3 if has_committed else 0)], wait_ms=900)
            world.advance(1_000)
            for member_id in members:
                world.beat_classic(member_id, generation)
            said = world.told_of(asked)[0]
            if said[2] > 3 or said[3]:
                return True
        return False

    assert not counts(5)
    other = world.join_classic("", reads, version=3, fresh="c", session_timeout_ms=300_000)
    world.join_classic(members[1], reads, version=3, session_timeout_ms=300_000)
    for _ in range(rebalance_s):
        world.advance(1_000)
        world.beat_classic(members[0], generation)
    joining = world.join_classic(members[0], reads, version=3, session_timeout_ms=300_000)
    generation = synced(joining if isinstance(joining, JoinGroupResponse) else world.answers[joining])
    world.sync_classic(world.answers[other].member_id, generation)
    assert not counts(TIMEOUT_MS // 1_000 - 5 - 2)
    assert counts(10)


def test_the_time_of_an_owner_does_not_count_while_a_transaction_is_open() -> None:
    """It reads what is committed: there is nothing that it could commit. Afterwards its time counts from the start."""
    open_at = [3]
    world = Asking(Image(1, dict(grown().by_name)))
    topic = replace(world.image.by_name["foo"], stable_end=lambda _: open_at[0])
    world.set_topics(Image(2, {"foo": replace(topic, partitions=(0,), lineage=Lineage.flat(1))}))
    a = world.join("A").member_epoch
    a = settle(world, "A", a)
    world.commit("A", a, 0, 3)
    world.set_topics(Image(3, {"foo": topic}))
    a = settle(world, "A", a)
    passes(world, 10 * TIMEOUT_MS // 1_000, A=a)
    assert not has(world, "A", 1)
    open_at[0] = 100
    passes(world, TIMEOUT_MS // 1_000 - 10, A=a)
    assert not has(world, "A", 1)
    passes(world, 30, A=a)
    assert has(world, "A", 1)


def test_an_owner_that_could_not_read_anything_is_not_taken_for_one_that_reads_from_the_end() -> None:
    """A transaction was open from the first record on when it was given the partition."""
    open_at = [0]
    topic = replace(grown().by_name["foo"], stable_end=lambda _: open_at[0])
    world = Asking(Image(1, {"foo": replace(topic, partitions=(0,), lineage=Lineage.flat(1))}))
    a = settle(world, "A", world.join("A").member_epoch)
    world.set_topics(Image(2, {"foo": topic}))
    a = settle(world, "A", a)
    passes(world, 2 * TIMEOUT_MS // 1_000, A=a)
    open_at[0] = 100
    passes(world, TIMEOUT_MS // 1_000 - 10, A=a)
    assert not has(world, "A", 1)
    passes(world, 30, A=a)
    assert has(world, "A", 1)


def test_the_time_of_an_owner_counts_up_to_when_it_spoke_last() -> None:
    """Its process is dead, and its session longer than its poll interval: others read its records when that is over."""
    topic = grown().by_name["foo"]
    for committed in (None, 3):
        world = Asking(Image(1, {"foo": replace(topic, partitions=(0,), lineage=Lineage.flat(1))}))
        a = settle(world, "A", world.join("A", rebalance_timeout_ms=10_000).member_epoch)
        if committed is not None:
            world.commit("A", a, 0, committed)
        world.set_topics(Image(2, {"foo": topic}))
        a = settle(world, "A", a)
        b = settle(world, "B", world.join("B", rebalance_timeout_ms=10_000).member_epoch)
        a = settle(world, "A", a)
        assert has(world, "A", 0)
        passes(world, 30, B=b)
        assert "A" in world.group.members and not has(world, "B", 1)
        a = settle(world, "A", a)
        passes(world, 20, A=a, B=b)
        assert has(world, "B", 1)
