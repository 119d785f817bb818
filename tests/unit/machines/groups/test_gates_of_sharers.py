"""Gates open for the keys that are done: a group's frontier in a parent partition, interval by interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.shares import done_below
from anabranch.machines.keyspace import SPACE_END, Interval
from anabranch.machines.lineage import Frontier, Lineage
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionRequestPartition,
    ConsumerGroupPositionRequestTopic,
)
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.support.groups import GROUP, GroupWorld, topic_id
from tests.support.sharing import Sharer, SharingWorld

FOO = topic_id("foo")
MIDDLE = 1 << 62
"""Partition 1 was made of the upper half of the keys of partition 0, which 5 records went into before."""
GROWN = Image(
    2,
    {"foo": TopicImage(FOO, "foo", (0, 1), lineage=Lineage.of_ends(1, (1, 2), ({0: 5},)), log_end=lambda _: 100)},
)


class World(GroupWorld):
    """Members A and B, of which one owns partition 0; partition 1 waits for its upper half to be read up to 5."""

    def __init__(self) -> None:
        super().__init__(GROWN)
        self.epochs = {name: self.join(name).member_epoch for name in ("A", "B")}
        self.owns = dict.fromkeys(self.epochs, "")
        self.settle()

    def settle(self) -> None:
        """Let members beat, and the coordinator look, until nothing changes."""
        for _ in range(6):
            self.advance(600)
            for name in self.epochs:
                answer = self.beat(name, self.epochs[name], self.owns[name])
                assert answer.error_code == ErrorCode.NONE, answer
                self.epochs[name] = answer.member_epoch
                told = self.told(answer)
                self.owns[name] = self.owns[name] if told is None else told

    def commit(self, *shares: tuple[int, int, int]) -> None:
        """The owner of partition 0 commits by key range."""
        owner = next(name for name, owned in self.owns.items() if "foo-0" in owned)
        part = OffsetCommitRequestPartition(
            partition_index=0,
            committed_offset=0,
            committed_metadata="",
            key_range_offsets=[KeyRangeOffset(start=start, end=end, offset=at) for start, end, at in shares],
        )
        request = OffsetCommitRequest(
            group_id=GROUP,
            member_id=owner,
            generation_id_or_member_epoch=self.epochs[owner],
            topics=[OffsetCommitRequestTopic(name="foo", partitions=[part])],
        )
        answer = self.submit(lambda machine: machine.offset_commit(request, Caller(version=9), self.now_ms))
        assert answer.topics[0].partitions[0].error_code == ErrorCode.NONE
        self.settle()

    @property
    def owned(self) -> list[str]:
        """All partitions that are owned."""
        return sorted(" ".join(self.owns.values()).split())


def test_a_partition_is_handed_out_when_its_own_keys_are_done_and_not_before() -> None:
    world = World()
    assert world.owned == ["foo-0"]
    world.commit((0, MIDDLE - 1, 5), (MIDDLE, SPACE_END, 4))
    assert world.owned == ["foo-0"]
    world.commit((MIDDLE, SPACE_END, 5))
    assert world.owned == ["foo-0", "foo-1"]


@pytest.mark.parametrize("lower", [0, 2])
def test_it_waits_for_no_other_keys_of_its_parent(lower: int) -> None:
    world = World()
    world.commit((0, MIDDLE - 1, lower), (MIDDLE, SPACE_END, 5))
    assert world.coordinator.positions.get(GROUP, "foo", 0) is not None
    assert world.owned == ["foo-0", "foo-1"]


def test_it_does_not_open_by_keys_that_are_not_its_own() -> None:
    world = World()
    world.commit((0, MIDDLE - 1, 90))
    world.commit((MIDDLE, SPACE_END - 1, 90))
    assert world.owned == ["foo-0"]


def test_it_opens_by_time_where_an_owner_of_all_keys_stands_still_that_are_not_equally_far() -> None:
    """As others had some before: it never did, as what the owner had done was looked at in two ways."""
    world = World()
    world.commit((0, MIDDLE - 1, 90))
    assert world.owned == ["foo-0"]
    for _ in range(20):
        world.settle()
    assert world.owned == ["foo-0", "foo-1"]


def test_an_owner_that_reports_that_it_goes_on_moves_also_where_some_keys_are_further() -> None:
    """Otherwise gates opened by time while it went on."""
    ahead = Frontier((0, MIDDLE), (90, 3))
    for offset in (-1, 50):
        moves = [done_below(offset, position, ahead) for position in range(3, 20)]
        assert moves == sorted(set(moves))
    assert done_below(50, 3, ahead) == done_below(50, 3, Frontier((0, MIDDLE), (60, 3))), "what is beyond is no move"


def shared_world(*names: str) -> SharingWorld:
    """The same partitions, which members may share."""
    topic = replace(GROWN.by_name["foo"], accepts_ranges=True, highest_count=2)
    world = SharingWorld(Image(2, {"foo": topic}))
    for name in names:
        world.members[name] = Sharer(world, name)
    return world


def beat(world: SharingWorld, *names: str) -> None:
    """Let some members beat, and the coordinator look, until nothing changes."""
    for _ in range(6):
        world.advance(600)
        for name in names or tuple(world.members):
            world.members[name].beat()
            world.check_owners()
            world.members[name].follow()


def report(world: SharingWorld, name: str, position: int) -> None:
    """Have a member tell its position in partition 0."""
    parts = [ConsumerGroupPositionRequestPartition(partition=0, position=position)]
    request = ConsumerGroupPositionRequest(
        group_id=GROUP,
        member_id=name,
        generation_id=world.members[name].epoch,
        topics=[ConsumerGroupPositionRequestTopic(topic="foo", topic_id=FOO, partitions=parts)],
    )
    world.submit(lambda machine: machine.consumer_group_position(request, "t", world.now_ms))
    world.answers.clear()
    world.advance(600)


def test_what_one_sharer_tells_of_its_position_opens_no_gate_and_what_the_owner_of_the_keys_commits_does() -> None:
    """Partition 0 has two sharers; only the one with the upper keys reads what partition 1 waits for."""
    world = shared_world("A", "B", "C")
    beat(world)
    (shared,) = world.owners().values()
    assert set(world.owners()) == {0} and len(shared) == 2
    first, last = sorted(shared, key=lambda name: shared[name])
    for name in (first, last):
        report(world, name, 100)
    beat(world)
    assert set(world.owners()) == {0}, "what is told is not the position of all keys"
    assert world.members[first].commit(90) == [ErrorCode.NONE]
    beat(world)
    assert set(world.owners()) == {0}, "its keys never moved"
    assert world.members[last].commit(5) == [ErrorCode.NONE]
    beat(world)
    assert set(world.owners()) == {0, 1}
    world.check()


@pytest.mark.parametrize("ahead", [[], ["first"]])
def test_a_sharer_that_stands_still_holds_up_others_for_its_rebalance_timeout_and_no_longer(ahead: list[str]) -> None:
    """As the owner of a whole partition does. Commits of the sharer that is further do not begin the time anew."""
    world = shared_world("A", "B", "C")
    beat(world)
    (shared,) = world.owners().values()
    names = dict(zip(("first", "last"), sorted(shared, key=lambda name: shared[name]), strict=True))
    began = world.now_ms
    offset = 5  # So many records are waited for.
    while world.now_ms < began + 55_000:
        assert set(world.owners()) == {0}, "there was time left"
        for name in ahead:
            world.members[names[name]].commit(offset := offset + 1)
        beat(world)
    deadline = world.now_ms + 20_000
    while set(world.owners()) == {0}:
        assert world.now_ms < deadline, "members wait for one that stands still"
        for name in ahead:
            world.members[names[name]].commit(offset := offset + 1)
        beat(world)
    world.check()


@pytest.mark.parametrize("other_stands_still", [True, False])
def test_the_time_of_a_sharer_begins_anew_when_it_commits(*, other_stands_still: bool) -> None:
    """Also where another, whose keys nobody waits for, is the one that is behind."""
    world = shared_world("A", "B", "C")
    beat(world)
    (shared,) = world.owners().values()
    first, last = sorted(shared, key=lambda name: shared[name])
    for offset in (1, 2, 3):
        began = world.now_ms
        while world.now_ms < began + 40_000:
            if not other_stands_still:
                assert world.members[first].commit(90) == [ErrorCode.NONE]
            assert set(world.owners()) == {0}
            beat(world)
        assert world.members[last].commit(offset) == [ErrorCode.NONE]
        beat(world)
    assert set(world.owners()) == {0}


def test_the_time_of_sharers_begins_anew_when_keys_are_given_to_another() -> None:
    """Who has them now has not had them for as long."""
    world = shared_world("A", "B", "C")
    beat(world)
    (shared,) = world.owners().values()
    began = world.now_ms
    while world.now_ms < began + 40_000:
        beat(world)
    world.leave_group(max(shared))
    beat(world)
    assert world.owners()[0] != shared
    began = world.now_ms
    while world.now_ms < began + 50_000:
        assert set(world.owners()) == {0}, "there was time left"
        beat(world)
    while set(world.owners()) == {0}:
        assert world.now_ms < began + 70_000, "members wait for one that stands still"
        beat(world)
    world.check()


def test_what_the_owner_of_a_partition_has_told_does_not_count_when_others_have_a_part_of_it() -> None:
    """It commits nothing of what it gives up: the others read that again, and partition 1 waits for them."""
    world = shared_world("A")
    beat(world)
    world.members["B"] = Sharer(world, "B")
    beat(world, "B", "A")
    assert set(world.owners()) == {0}
    (owner,) = world.owners()[0]
    report(world, owner, 100)
    world.members["C"] = Sharer(world, "C")
    beat(world, "C", owner)
    beat(world, "C")
    assert set(world.owners()[0]) == {"C", owner}
    beat(world)
    assert set(world.owners()) == {0}
    for name in ("C", owner):
        assert world.members[name].commit(5) == [ErrorCode.NONE]
    beat(world)
    assert set(world.owners()) == {0, 1}


def test_keys_that_a_member_left_behind_are_handed_out_when_their_gate_opens() -> None:
    """Partition 1 went back into partition 0, of which the others hold the rest: the gate is of the free keys, too."""
    lineage = Lineage.of_ends(1, (1, 2, 1), ({0: 5}, {0: 10, 1: 8}))
    foo = GROWN.by_name["foo"]
    topic = replace(foo, lineage=lineage, accepts_ranges=True, highest_count=2, partitions=(0,), retiring=(1,))
    world = SharingWorld(Image(2, {"foo": topic}))
    for name in "ABC":
        world.members[name] = Sharer(world, name)
    beat(world)
    for member in world.members.values():
        assert set(member.commit(10)) == {ErrorCode.NONE}
    beat(world)
    assert set(world.owners()) == {0, 1}
    gone = world.members.pop("C")
    world.beat_owning("C", -1, [])
    beat(world)
    assert size(key for held in world.owners()[0].values() for key in held) < SPACE_END, gone.owned
    for member in world.members.values():
        keys = {at: ranges for at, ranges in member.owned.items() if at[1] == 1}
        assert set(member.commit(8, keys)) <= {ErrorCode.NONE}
    beat(world)
    assert size(key for held in world.owners()[0].values() for key in held) == SPACE_END + 1


def size(keys: Iterable[Interval]) -> int:
    return sum(key.size for key in keys)
