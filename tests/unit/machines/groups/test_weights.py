"""Weights of decisions: what ends a rebalance of a large classic group, or compares it, is not for the loop."""

from __future__ import annotations

import random

import pytest

from anabranch.machines.groups.positions import Positions
from anabranch.machines.groups.ranged import FOLD_KEY, FOLDED
from anabranch.machines.groups.records import TransactionRangesKey, TransactionRangesValue
from anabranch.machines.groups.transaction_ranges import TransactionRanges
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from tests.support.groups import GROUP, GroupWorld, assignment, subscription, topic_id
from tests.support.ranged_group import RangedGroup

MANY = 400
PROTOCOLS = {"range": subscription("foo")}


def join(member: str = "", instance: str | None = None, metadata: bytes = b"") -> JoinGroupRequest:
    protocols = [JoinGroupRequestProtocol(name="range", metadata=metadata)]
    return JoinGroupRequest(group_id=GROUP, member_id=member, group_instance_id=instance, protocols=protocols)


def sync(count: int = 0) -> SyncGroupRequest:
    given = [SyncGroupRequestAssignment(member_id=f"m{number}", assignment=b"") for number in range(count)]
    return SyncGroupRequest(group_id=GROUP, member_id="m0", assignments=given)


def large() -> GroupWorld:
    """A group of many members, all joined; the first is static."""
    world = GroupWorld()
    for number in range(MANY):
        instance = "i" if number == 0 else None
        world.join_classic("", PROTOCOLS, version=3, fresh=f"m{number}", instance=instance)
    return world


def begin(world: GroupWorld) -> None:
    """Wait for the first generation: its delay grows while members come."""
    while not world.coordinator.groups[GROUP].generation:  # type: ignore[union-attr]
        world.advance(3_001)


def test_only_what_ends_a_rebalance_of_many_members_weighs() -> None:
    world = large()
    machine = world.coordinator
    assert machine.weight_of_join(join()) == 0, "it waits for more members"
    assert machine.weight_of_timer(("classic", GROUP, "join")) == MANY
    begin(world)
    assert machine.weight_of_sync(sync(MANY)) == MANY
    assert machine.weight_of_sync(sync()) == 0
    assert machine.weight_of_join(join("classic-m1")) == 0
    for number in range(1, MANY - 1):
        world.join_classic(f"classic-m{number}", {"range": subscription("foo", "bar")}, version=3)
    assert machine.weight_of_join(join("i-m0")) == MANY, "the last one but one"
    assert machine.weight_of_classic(GROUP, None) == MANY, "a member that leaves"


def test_a_static_member_that_comes_back_weighs_what_is_compared() -> None:
    world = GroupWorld()
    world.join_classic("", PROTOCOLS, version=3, fresh="m0", instance="i")
    begin(world)
    whole = assignment(" ".join(f"foo-{number}" for number in range(5_000)))
    world.sync_classic("i-m0", 1, [SyncGroupRequestAssignment(member_id="i-m0", assignment=whole)])
    machine = world.coordinator
    assert machine.weight_of_join(join("", "i")) >= len(whole) // 32
    assert machine.weight_of_join(join("", "i", bytes(32_000))) >= (len(whole) + 64_000) // 32
    assert machine.weight_of_join(join("", "another", bytes(32_000))) <= 1
    assert machine.weight_of_join(JoinGroupRequest(group_id="unknown")) == 0


def test_committed_offsets_weigh_by_the_ranges_that_are_copied() -> None:
    group = RangedGroup()
    group.committed(1)
    group.committed(ranges=[(2 * number, 2 * number) for number in range(1, 5_001)])

    def weight(partition: int, version: int = 9, group_id: str = "g") -> int:
        topic = OffsetFetchRequestTopics(
            name="foo" if version < 10 else "",
            topic_id=topic_id("foo"),
            partition_indexes=[partition],
        )
        asked = OffsetFetchRequestGroup(group_id=group_id, topics=[topic])
        return group.coordinator.weight_of_fetch(asked, version)

    assert weight(0) == weight(0, version=10) == 500
    assert weight(1) == weight(0, group_id="another") == 0


def decide(changes: TransactionRanges, group_id: str, producer_id: int) -> None:
    """A transaction has committed ranges of a group."""
    key = TransactionRangesKey(group=group_id, topic="foo", partition=0, producer_id=producer_id, number=1)
    changes.apply(key, TransactionRangesValue(base=0, since=1), -1)


def test_a_fold_weighs_by_the_group_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the one before, which is folded, nor by one that a log has refused."""
    monkeypatch.setattr(Positions, "unread_count", lambda positions, group_id: {"small": 1, "large": MANY}[group_id])
    machine = GroupWorld().coordinator
    changes = machine.offsets.in_transactions
    assert machine.weight_of_timer(FOLD_KEY) == 0
    decide(changes, "small", 1)
    decide(changes, "large", 2)
    assert machine.weight_of_timer(FOLD_KEY) == 1
    small = changes.next_decided()
    assert small is not None
    assert machine.weight_of_timer((FOLDED, *small.name)) == MANY
    assert machine.weight_of_timer(FOLD_KEY) == MANY, "the small one has been refused"


@pytest.mark.parametrize("seed", range(20))
def test_the_change_to_be_folded_is_foreseen(seed: int) -> None:
    chance, changes = random.Random(seed), TransactionRanges()
    given = []
    for number in range(200):
        if chance.random() < 0.5:
            decide(changes, f"g{number % 7}", number)
        last = chance.choice([None, None, *(it.name for it in given[-2:])])
        foreseen = changes.upcoming(last)
        if last is not None:
            changes.set_folded(last)
        change = changes.next_decided()
        assert change is foreseen
        assert change is None or len(changes.decided) == 1 or not given or change is not given[-1]
        given += [] if change is None else [change]
    while len(changes.decided) > 1:  # Whatever a log has refused, each of them has its turn.
        turns = [changes.next_decided() for _ in range(len(changes.decided))]
        assert {it.name for it in turns if it is not None} == changes.decided.keys()
        changes.set_folded(next(iter(changes.decided)))
