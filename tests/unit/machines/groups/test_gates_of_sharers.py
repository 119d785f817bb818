"""Gates open for the keys that are done: a group's frontier in a parent partition, interval by interval."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.lineage import Lineage
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.support.groups import GROUP, GroupWorld, topic_id

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
