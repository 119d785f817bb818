"""The course of a rebalance where it differs: members that do not come back, do not sync, or come late."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicState
from tests.support.classic_groups import GroupWorld


def joined(world: GroupWorld, *names: str) -> dict[str, str]:
    """A stable group; member ids by name."""
    joins = {name: world.join(name, version=3) for name in names}
    world.advance(6_000)
    ids = {name: call.member_id for name, call in joins.items()}
    leader = next(iter(joins.values())).leader
    generation = next(iter(joins.values())).generation_id
    for member_id in [it for it in ids.values() if it != leader]:
        world.sync(member_id, generation)
    world.sync(leader, generation, dict.fromkeys(ids.values(), b"x"))
    assert world.group.state is ClassicState.STABLE
    return ids


def test_a_first_rebalance_waits_again_for_as_long_as_members_come() -> None:
    world = GroupWorld(initial_rebalance_delay_ms=3_000)
    first = world.join("a", version=3)
    world.advance(2_999)
    second = world.join("b", version=3)
    world.advance(1)
    assert first.is_parked and second.is_parked, "somebody came, so it waits once more"
    world.advance(2_999)
    assert first.is_parked
    world.advance(1)
    assert first.generation_id == second.generation_id == 1


def test_members_that_do_not_join_again_are_out_after_the_rebalance_timeout_though_they_heartbeat() -> None:
    world = GroupWorld()
    ids = joined(world, "a", "b")
    again = world.join("a", ids["a"], version=3)
    assert again.is_parked and world.group.state is ClassicState.PREPARING_REBALANCE
    for _ in range(11):
        world.advance(5_000)
        assert world.heartbeat(ids["b"]) == ErrorCode.REBALANCE_IN_PROGRESS
    assert again.is_parked and world.group.rebalance_timeout_ms == 60_000
    world.advance(5_000)
    assert again.generation_id == 2 and set(world.group.members) == {ids["a"]}


def test_members_that_join_and_do_not_sync_are_out_and_the_others_rebalance() -> None:
    world = GroupWorld()
    ids = joined(world, "a", "b")
    a, b = world.join("a", ids["a"], version=3), world.join("b", ids["b"], version=3)
    assert a.generation_id == b.generation_id == 2
    leader = a.leader
    follower = next(it for it in ids.values() if it != leader)
    world.sync(leader, 2, {leader: b"x", follower: b"y"})
    assert world.group.state is ClassicState.STABLE and set(world.group.unsynced) == {follower}
    world.advance(world.group.rebalance_timeout_ms)
    assert follower not in world.group.members


def test_a_sync_that_waits_when_a_rebalance_begins_is_told_so() -> None:
    world = GroupWorld()
    ids = joined(world, "a", "b")
    a, b = world.join("a", ids["a"], version=3), world.join("b", ids["b"], version=3)
    follower = next(it for it in ids.values() if it != a.leader)
    waiting = world.sync(follower, b.generation_id)
    assert waiting.is_parked
    world.join("c", version=3)
    assert waiting.error == ErrorCode.REBALANCE_IN_PROGRESS
    assert world.group.state is ClassicState.PREPARING_REBALANCE


def test_the_last_member_that_leaves_ends_the_generation() -> None:
    world = GroupWorld()
    ids = joined(world, "a")
    world.leave(ids["a"])
    assert world.group.state is ClassicState.EMPTY and world.group.generation == 2
