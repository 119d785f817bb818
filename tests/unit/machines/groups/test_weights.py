"""Weights of decisions: what ends a rebalance of a large classic group, or compares it, is not for the loop."""

from __future__ import annotations

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
