"""Gates that open by time: each opening is told once, in the look that opens it, and is described while it lasts."""

from __future__ import annotations

import pytest

from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.gate_effects import GateOpenedByTime
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.lineage import Lineage
from anabranch.protocol.messages.consumer_group_describe import WaitingPartition
from tests.support.groups import GROUP
from tests.unit.machines.groups.test_gates_of_sharers import beat, shared_world
from tests.unit.machines.groups.test_positions_asked import (
    FOO,
    TIMEOUT_MS,
    Asking,
    classic_generation,
    classic_group,
    flat,
    grown,
    settle,
    two_members,
)
from tests.unit.machines.groups.test_starts import Topic

STEP_MS = 10_000
GATE, LEFT = 10, 5
"""Where the gate of partition 0 is after the shrink, and how many records of partition 1 it waits for."""


def shrunk(*counts: int) -> Image:
    """Topic foo with two partitions, and then with one."""
    lineage = Lineage.of_ends(1, counts, [{0: GATE, 1: LEFT}]) if len(counts) > 1 else Lineage.flat(2)
    ends = {0: GATE + 5 * (len(counts) - 1), 1: LEFT}
    topic = TopicImage(FOO, "foo", range(counts[-1]), range(counts[-1], 2), lineage, log_end=ends.__getitem__)
    return Image(len(counts), {"foo": topic})


def two_at_a_shrink(world: Asking, committed: int = GATE) -> dict[str, int]:
    """A owns partition 0 and B partition 1; A has committed what it can before its gate, B nothing. Their epochs."""
    epochs = {name: world.join(name).member_epoch for name in "AB"}
    settled(world, epochs)
    world.commit("A", epochs["A"], 0, committed)
    world.set_topics(shrunk(2, 1))
    settled(world, epochs)
    assert [world.named(world.group.members[name].assigned) for name in "AB"] == ["foo-0", "foo-1"]
    return epochs


def settled(world: Asking, epochs: dict[str, int]) -> None:
    for _ in range(3):
        epochs.update({name: settle(world, name, epoch) for name, epoch in epochs.items()})


def asks_until_overdue(world: Asking, epochs: dict[str, int]) -> None:
    """Have A ask for partition 1, and time pass, until its gate may open."""
    until, known = world.now_ms + 2 * TIMEOUT_MS, -1
    while True:
        answer = world.ask("A", epochs["A"], needs=[(1, known)], wait_ms=STEP_MS)
        world.advance(STEP_MS)
        for name, epoch in epochs.items():
            world.beat(name, epoch)
        ((_, _, known, is_overdue),) = world.told_of(answer)
        if is_overdue:
            break
        assert world.now_ms < until, "the gate stays closed"


def opened(world: Asking) -> list[tuple[int, int, int]]:
    """The partition, the one that it waited on, and the records left there, of each gate that opened by time."""
    found = [(it.partition, it.waited_on, it.records_left) for it in world.effects if type(it) is GateOpenedByTime]
    assert len(found) == len(world.effects)
    return found


def test_a_classic_member_of_ours_that_is_told_of_it_is_counted() -> None:
    world = Asking(flat())
    member, generation = classic_group(world, owned="foo-0 foo-1")
    world.commit(member, generation, 0, 3)
    for _ in range(TIMEOUT_MS // STEP_MS + 2):
        answer = world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
        world.advance(STEP_MS)
        world.beat_classic(member, generation)
    assert world.told_of(answer) == [(0, False, 3, True)]
    assert opened(world) == [(1, 0, 2)]


def test_a_member_of_ours_that_waits_at_the_gate_of_its_own_partition_is_counted() -> None:
    world = Asking(shrunk(2))
    epochs = two_at_a_shrink(world)
    asks_until_overdue(world, epochs)
    assert opened(world) == [(0, 1, LEFT)]
    asks_until_overdue(world, epochs)
    assert opened(world) == [(0, 1, LEFT)], "told once"


def test_a_hand_out_after_everything_is_read_is_none() -> None:
    world = Asking(shrunk(2))
    epochs = two_at_a_shrink(world)
    asks_until_overdue(world, epochs)
    world.effects.clear()
    world.commit("B", epochs["B"], 1, LEFT)
    world.commit("A", epochs["A"], 0, GATE + 1)
    world.leave("A")
    del epochs["A"]
    settled(world, epochs)
    assert world.named(world.group.members["B"].assigned).split()[0] == "foo-0"
    assert not opened(world), "nothing was left to read"


def test_a_stock_member_that_owns_what_waits_is_not_counted() -> None:
    """It is given all records of its partition whatever the gate."""
    world = Asking(shrunk(2))
    epochs = two_at_a_shrink(world)
    for _ in range(2 * TIMEOUT_MS // STEP_MS):
        world.advance(STEP_MS)
        for name, epoch in epochs.items():
            world.beat(name, epoch)
    assert not opened(world)


def test_a_gate_that_opens_by_time_again_is_counted_again() -> None:
    """The position before it has moved, and stands still again."""
    world = Asking(shrunk(2))
    epochs = two_at_a_shrink(world)
    asks_until_overdue(world, epochs)
    world.commit("B", epochs["B"], 1, 2)
    asks_until_overdue(world, epochs)
    assert opened(world) == [(0, 1, LEFT), (0, 1, LEFT - 2)]


def test_a_member_that_has_committed_nothing_before_its_gate_is_counted_when_it_asks() -> None:
    """It was handed all that comes before the gate; the coordinator sees only that it asks."""
    world = Asking(shrunk(2))
    epochs = two_at_a_shrink(world, committed=GATE - 1)
    asks_until_overdue(world, epochs)
    assert opened(world) == [(0, 1, LEFT)]


@pytest.mark.parametrize("last", ["by commit", "by time"])
def test_a_gate_that_waits_on_two_partitions_has_opened_by_time_if_one_of_them_has_records_left(last: str) -> None:
    """Three partitions become one: 0 waits for 1 and 2."""
    lineage = Lineage.of_ends(1, (3, 1), ({0: 0, 1: LEFT, 2: LEFT},))
    ends = {0: 5, 1: LEFT, 2: LEFT}
    world = Asking(Image(1, {"foo": TopicImage(FOO, "foo", range(3), (), Lineage.flat(3), log_end=ends.__getitem__)}))
    epochs = {name: world.join(name).member_epoch for name in "ABC"}
    settled(world, epochs)
    owners = {world.named(member.assigned): name for name, member in world.group.members.items()}
    a, _, c = (owners[f"foo-{number}"] for number in range(3))
    world.commit(a, epochs[a], 0, 0)
    topic = TopicImage(FOO, "foo", (0,), (1, 2), lineage, log_end=ends.__getitem__)
    world.set_topics(Image(2, {"foo": topic}))
    settled(world, epochs)

    def passes(seconds: int) -> None:
        for _ in range(seconds):
            world.advance(1_000)
            for name, epoch in epochs.items():
                world.beat(name, epoch)
            world.ask(a, epochs[a], needs=[(1, -1), (2, -1)], wait_ms=0)

    passes(30)
    world.commit(c, epochs[c], 2, 1)
    passes(TIMEOUT_MS // 1_000 - 20)
    assert not opened(world), "partition 2 is still waited for"
    if last == "by commit":
        world.commit(c, epochs[c], 2, LEFT)
        passes(2)
        assert opened(world) == [(0, 1, LEFT)]
    else:
        passes(30)
        assert opened(world) == [(0, 1, LEFT)]


# -- described -----------------------------------------------------------------------------------------------------


def described(world: Asking) -> list[tuple[int, int, bool, list[tuple[int, str, int, int]]]]:
    """Of each waiting partition for how long it has waited, whether it is open by time, and what it waits on."""
    view = world.coordinator.describe_consumer_group(GROUP, world.now_ms)
    return [shown(it) for it in view.waiting_partitions]


def shown(it: WaitingPartition) -> tuple[int, int, bool, list[tuple[int, str, int, int]]]:
    waits = [(on.partition, on.member_id, on.position, on.offset) for on in it.waits_on]
    return it.partition, it.waits_ms, it.opened_by_time, waits


def test_a_member_of_ours_that_stops_at_the_gate_of_its_own_partition_is_described() -> None:
    world = Asking(shrunk(2))
    epochs = two_at_a_shrink(world)
    assert not described(world), "a stock consumer stops at no gate within a partition"
    began_ms = world.now_ms
    world.ask("A", epochs["A"], needs=[(1, -1)], wait_ms=0)
    world.advance(1_500)
    assert described(world) == [(0, world.now_ms - began_ms, False, [(1, "B", 0, LEFT)])]
    asks_until_overdue(world, epochs)
    ((partition, waited_ms, by_time, waits),) = described(world)
    assert (partition, by_time, waits) == (0, True, [(1, "B", 0, LEFT)])
    assert TIMEOUT_MS <= waited_ms <= TIMEOUT_MS + STEP_MS
    world.advance(STEP_MS)
    assert described(world)[0][1] == waited_ms, "it waits no longer"
    world.commit("A", epochs["A"], 0, GATE + 1)
    assert described(world), "records are left where it waited"
    world.commit("B", epochs["B"], 1, LEFT)
    assert not described(world)


def test_a_gate_that_closes_again_waits_from_then_on() -> None:
    world = Asking(shrunk(2))
    epochs = two_at_a_shrink(world)
    asks_until_overdue(world, epochs)
    world.commit("B", epochs["B"], 1, 2)
    world.advance(2_000)
    assert described(world) == [(0, 2_000, False, [(1, "B", 2, LEFT)])]


def test_a_partition_that_was_handed_out_by_time_is_described_while_records_are_left() -> None:
    world = Asking(flat())
    a, b = two_members(world)
    world.commit("A", a, 0, 3)
    for _ in range(TIMEOUT_MS // STEP_MS + 2):
        world.advance(STEP_MS)
        world.beat("A", a)
        world.beat("B", b)
    assert world.named(world.group.members["B"].assigned) == "foo-1"
    ((partition, _, by_time, waits),) = described(world)
    assert (partition, by_time, waits) == (1, True, [(0, "A", 3, 5)])
    world.commit("A", a, 0, 5)
    assert not described(world)


def of_classic(coordinator: Coordinator, now_ms: int) -> list[tuple[int, int, bool, list[tuple[int, str, int, int]]]]:
    return [shown(it) for it in coordinator.view_group(GROUP, now_ms).described().waiting_partitions]


def test_a_classic_member_of_ours_that_waits_is_described() -> None:
    world = Asking(flat())
    member, generation = classic_group(world, owned="foo-0 foo-1")
    assert not of_classic(world.coordinator, world.now_ms), "nothing is known of a stock consumer's gates"
    world.commit(member, generation, 0, 3)
    world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
    world.advance(1_000)
    assert of_classic(world.coordinator, world.now_ms) == [(1, 1_000, False, [(0, member, 3, 5)])]
    for _ in range(TIMEOUT_MS // STEP_MS + 2):
        world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
        world.advance(STEP_MS)
        world.beat_classic(member, generation)
    ((partition, _, by_time, waits),) = of_classic(world.coordinator, world.now_ms)
    assert (partition, by_time, waits) == (1, True, [(0, member, 3, 5)])
    world.commit(member, generation, 0, 5)
    assert not of_classic(world.coordinator, world.now_ms)


def test_of_a_shared_partition_the_sharer_is_named_that_holds_up() -> None:
    """Partition 0 has two sharers, of which the one with the first keys has committed them."""
    world = shared_world("A", "B", "C")
    beat(world)
    (shared,) = world.owners().values()
    first, last = sorted(shared, key=lambda name: shared[name])
    world.members[first].commit(90)
    beat(world)
    view = world.coordinator.describe_consumer_group(GROUP, world.now_ms)
    assert [on.member_id for it in view.waiting_partitions for on in it.waits_on] == [last]


def test_a_group_of_the_other_protocol_is_refused_without_waiting_partitions() -> None:
    world = Asking(grown())
    two_members(world)
    assert world.coordinator.describe_consumer_group(GROUP, world.now_ms).waiting_partitions
    view = world.coordinator.view_group(GROUP, world.now_ms).described()
    assert view.error_code and not view.waiting_partitions


def test_a_gate_that_has_opened_by_time_is_not_described_when_the_leader_says_that_nothing_is_left() -> None:
    """The last records of partition 1 are of a transaction that is aborted only then: no position has moved."""
    world = Asking(shrunk(2))
    epochs = two_at_a_shrink(world)
    world.commit("B", epochs["B"], 1, 2)
    asks_until_overdue(world, epochs)
    assert [waits for _, _, _, waits in described(world)] == [[(1, "B", 2, LEFT)]]
    world.next_records["foo", 1] = lambda offset: max(offset, LEFT)
    world.advance(STEP_MS)
    assert not described(world)
    assert opened(world) == [(0, 1, LEFT - 2)]


def test_a_gate_on_what_is_read_is_not_told_because_another_of_its_topic_opens_by_time() -> None:
    """Gates are decided anew with each image: those of all families were counted, but of what was decided first."""
    topic = Topic(4)
    topic.ends = dict.fromkeys(range(4), 5)
    world = Asking(topic.image())
    member, generation = classic_generation(world, owned=" ".join(f"foo-{number}" for number in range(8)))
    world.set_topics(topic.resize(8))
    topic.ends |= dict.fromkeys(range(4, 8), 3)
    for number in range(4):
        world.commit(member, generation, number, 3 if number == 0 else 5)
    for step_ms in [STEP_MS] * (TIMEOUT_MS // STEP_MS + 2) + [1_000] * 5:
        world.ask(member, generation, needs=[(0, -1)], wait_ms=0)
        world.advance(step_ms)
        world.beat_classic(member, generation)
        world.set_topics(topic.image())
    assert opened(world) == [(4, 0, 2)]
