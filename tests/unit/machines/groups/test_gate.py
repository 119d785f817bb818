"""What a heartbeat decides of the gates of a large topic: nothing; and that nobody waits for what looks decide."""

from __future__ import annotations

from unittest import mock

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import gates
from anabranch.machines.groups.consumer import heartbeat
from anabranch.machines.groups.consumer.reconcile import reconcile
from anabranch.machines.groups.gate import HEARTBEAT_ROOM
from anabranch.machines.groups.gatekeeper import LOOK_ON_MS, LOOK_ROOM, Gatekeeper
from anabranch.machines.groups.gates import COST
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.lineage import Lineage
from tests.support.groups import GROUP
from tests.unit.machines.groups.test_positions_asked import FOO, Asking, settle

MANY = LOOK_ROOM
FEW = HEARTBEAT_ROOM // COST
"""Partitions without relatives that a heartbeat decides."""


def grown(first: int, count: int, unread: int = 0) -> Image:
    """Topic foo had `first` partitions, so many records in one of them, and has `count`."""
    lineage = Lineage.of_ends(first, (first, count), ({0: unread},)) if count > first else Lineage.flat(first)
    return Image(count, {"foo": TopicImage(FOO, "foo", range(count), lineage=lineage, log_end=lambda _: 100)})


class Judged:
    """Counts the gates that are decided."""

    def __init__(self) -> None:
        self.count = 0

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    counted, judge = Judged(), gates.judge

    def counting(*given: object) -> gates.Verdict:
        counted.count += 1
        return judge(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(gates, "judge", counting)
    return counted


def resized(count: int, *, first: int = 1, unread: int = 0) -> tuple[Asking, int]:
    """A has the `first` partitions; now there are `count`, and no look was taken; its epoch."""
    world = Asking(grown(first, first))
    epoch = world.join("A").member_epoch
    with no_looks(world):
        world.set_topics(grown(first, count, unread))
    return world, epoch


def no_looks(world: Asking) -> mock._patch[mock.MagicMock]:
    return mock.patch.object(world, "ring")


def owned(world: Asking) -> int:
    return sum(len(numbers) for _, numbers in world.group.members["A"].assigned)


def test_a_heartbeat_decides_few_gates_at_once_and_none_of_many(judged: Judged) -> None:
    world, epoch = resized(FEW)
    with no_looks(world):
        world.beat("A", epoch)
    assert judged.take() == FEW - 1 and owned(world) == FEW
    world, epoch = resized(MANY)
    judged.take()
    with no_looks(world):
        for _ in range(3):
            epoch = world.beat("A", epoch).member_epoch
    assert judged.take() == 0
    assert owned(world) == 1, "no gate is told open before it is decided"


def test_looks_decide_by_what_they_cost_and_the_next_heartbeat_hands_out(judged: Judged) -> None:
    world, epoch = resized(MANY)
    with no_looks(world):
        epoch = world.beat("A", epoch).member_epoch
        epoch = world.beat("A", epoch).member_epoch
    world.ring()
    assert 0 < judged.take() <= LOOK_ROOM // COST
    world.advance(MANY * LOOK_ON_MS)
    epoch = world.beat("A", epoch).member_epoch
    assert owned(world) == MANY
    assert judged.take() <= MANY


def test_looks_end_a_question_when_they_have_decided_an_open_gate(judged: Judged) -> None:
    world, epoch = resized(2 * MANY, first=MANY)
    with no_looks(world):
        epoch = world.beat("A", epoch).member_epoch
        epoch = world.beat("A", epoch).member_epoch
        judged.take()
        with mock.patch.object(Gatekeeper, "refresh", return_value=0):
            ticket = world.ask("A", epoch, reports=[(0, 0)])
        assert judged.take() == 0
    assert isinstance(ticket, int)
    world.ring()
    assert ticket not in world.answers, "the first gates are of partitions that the member has"
    world.advance(2 * LOOK_ON_MS)
    assert world.coordinator.keeper.of(GROUP).evaluated[FOO].left
    assert world.answers[ticket].error_code == ErrorCode.REBALANCE_IN_PROGRESS


def test_a_member_without_news_is_reconciled_once_while_looks_close_its_gates() -> None:
    world, epoch = resized(MANY, unread=5)
    with mock.patch.object(heartbeat, "reconcile", wraps=reconcile) as calls:
        for _ in range(2):
            epoch = world.beat("A", epoch).member_epoch
        before = calls.call_count
        for _ in range(MANY * (COST + 1) // LOOK_ROOM):
            world.advance(LOOK_ON_MS)
            world.beat("A", epoch)
        assert calls.call_count <= before + 1
    assert owned(world) == 1
    closed = world.coordinator.keeper.of(GROUP).evaluated[FOO].closed
    assert len(closed) == MANY - 1
    world.commit("A", epoch, 0, 5)
    world.advance(MANY * LOOK_ON_MS)
    world.beat("A", epoch)
    assert owned(world) == MANY


def test_partitions_that_came_back_are_taken_away_when_looks_have_found_what_is_waited_for() -> None:
    """The member was reconciled between two looks, when nothing was taken away yet."""
    world = Asking(again(1))
    epoch = settle(world, "A", world.join("A").member_epoch)
    assert owned(world) == MANY
    for number in range(MANY):
        world.commit("A", epoch, number, 3)
    with no_looks(world):
        world.set_topics(again(3))
        epoch = world.beat("A", epoch).member_epoch
    for _ in range(MANY * (COST + 1) // LOOK_ROOM):
        world.advance(LOOK_ON_MS)
        world.beat("A", epoch)
    world.advance(1_000)
    world.beat("A", epoch)
    assert owned(world) == 1


def again(layout: int) -> Image:
    """Topic foo had one partition, many with 3 records each, one with more records, unread, and has many again."""
    cuts = [{0: 0}, dict.fromkeys(range(MANY), 3), {0: 9}]
    counts = (1, MANY, 1, MANY)[: layout + 1]
    lineage = Lineage.of_ends(1, counts, cuts[:layout])
    topic = TopicImage(FOO, "foo", range(counts[-1]), range(counts[-1], MANY), lineage=lineage, log_end=lambda _: 100)
    return Image(layout, {"foo": topic})
