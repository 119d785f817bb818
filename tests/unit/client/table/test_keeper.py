"""A commit with its changes, and keys that leave while it is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.consumer import Consumer
from anabranch.client.consumer.listeners import GroupMetadata
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.client.producer.producer import Producer
from anabranch.client.table.keeper import Keeper
from anabranch.client.table.kept import Kept
from anabranch.client.table.keyed_table import KeyedTable
from anabranch.machines.clients.table import KeyNotOwnedError
from anabranch.machines.clients.table.table import place_of
from anabranch.machines.keyspace import SPACE, cuts
from anabranch.machines.lineage import Lineage

TP = TopicPartition("t", 0)
LOWER, UPPER = cuts(SPACE, 2)
LOW, HIGH = (
    next(key for key in (b"%d" % n for n in range(99)) if each.start <= place_of(key, 1)[1] <= each.end)
    for each in (LOWER, UPPER)
)
GROUP = GroupMetadata("g", 1, "m", None)


class Transactions:
    """A producer that remembers what it was asked."""

    abortable = True

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.begun: Callable[[], None] = lambda: None
        """What happens as a transaction begins."""

    async def begin_transaction(self) -> None:
        self.begun()

    async def send(self, topic: str, value: bytes | None, *, key: bytes) -> None:
        self.asked.append((key, value))

    async def send_offsets_to_transaction(self, offsets: Mapping[Any, Any], group: GroupMetadata) -> None:
        self.asked.append("offsets")

    async def commit_transaction(self) -> None:
        self.asked.append("commit")

    async def abort_transaction(self) -> None:
        self.asked.append("abort")


class World:
    """The table of a member of a group that reads all of a partition, with a change of a low and of a high key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **alone: str) -> None:
        self.consumer = Consumer("127.0.0.1:1", group_id=None if alone else "g")
        table = KeyedTable(self.consumer, "c", "t", **alone)  # type: ignore[arg-type]
        self.keeper = cast(Keeper, self.consumer.driver.state)
        self.kept: Kept = table._kept
        machine, lineage = self.kept.machine, Lineage.of_ends(1, (1,))
        machine.admit(lineage, TP, 0, 1)
        for load in machine.take_loads():
            machine.loaded(load)
        machine.put(LOW, b"1", 3)
        machine.put(HIGH, b"1", 3)
        self.producer = Transactions()

        async def ready() -> Producer:
            return cast(Producer, self.producer)

        monkeypatch.setattr(self.keeper, "_ready", ready)


def test_offsets_of_keys_that_left_meanwhile_are_not_committed_without_their_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator would take them, as it has not heard yet that the keys have left."""

    async def scenario(leave: Callable[[World], None]) -> None:
        world = World(monkeypatch)
        left: list[bool] = []

        def check_held() -> None:
            if left:
                raise ApiError(ErrorCode.STALE_MEMBER_EPOCH, "gave up the partitions")

        def begun() -> None:
            leave(world)
            left.append(True)

        world.producer.begun = begun
        with pytest.raises(ApiError, match="gave up"):
            await world.keeper.commit({TP: OffsetAndMetadata(3)}, GROUP, check_held)
        assert (HIGH, b"1") not in world.producer.asked
        assert world.producer.asked[-1] == "abort" and "offsets" not in world.producer.asked
        await world.consumer.close()

    asyncio.run(scenario(lambda world: world.consumer.driver.narrowed(TP, (UPPER,))))
    asyncio.run(scenario(lambda world: world.consumer.driver.dropped([TP])))


def test_a_commit_writes_the_changes_and_then_the_offsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        world = World(monkeypatch)
        await world.keeper.commit({TP: OffsetAndMetadata(3)}, GROUP, lambda: None)
        assert world.producer.asked == [(LOW, b"1"), (HIGH, b"1"), "offsets", "commit"]
        assert world.keeper.unflushed() == set()
        await world.consumer.close()

    asyncio.run(scenario())


def test_ranges_that_leave_take_their_state_along_and_the_others_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        world = World(monkeypatch)
        world.consumer.driver.narrowed(TopicPartition("another", 0), (UPPER,))
        assert world.kept.get(HIGH) == b"1"
        world.consumer.driver.narrowed(TP, (UPPER,))
        assert world.kept.get(LOW) == b"1"
        with pytest.raises(KeyNotOwnedError):
            world.kept.get(HIGH)
        assert world.kept.machine.unflushed_size == len(LOW) + 1
        await world.consumer.close()

    asyncio.run(scenario())


def test_offsets_of_a_share_by_hand_that_was_assigned_anew_meanwhile_are_not_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        world = World(monkeypatch, progress="p", transactional_id="p-1")
        standalone = world.keeper._standalone
        assert standalone is not None
        world.consumer.assign([TP])
        standalone._known[TP] = standalone._assigned(TP)
        monkeypatch.setattr(world.consumer.driver, "consumed", lambda: {TP: 3})

        def assign_nothing() -> None:
            world.consumer.assign([])
            assert standalone.is_known(world.keeper.run, world.keeper._take_over, world.keeper.released)

        world.producer.begun = assign_nothing
        with pytest.raises(ApiError, match="t-0 were not committed: they were assigned anew meanwhile"):
            await world.keeper.flush()
        assert world.producer.asked == ["abort"]
        await world.consumer.close()

    asyncio.run(scenario())
