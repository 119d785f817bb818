"""What becomes of a transaction marker, for every state of its producer and its partition."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import PRODUCER_ID_BITS
from anabranch.machines.partition.markers import MarkerVerdict, aliases, decide_marker
from anabranch.machines.partition.producers import Marker, ProducerTable, redirected

PRODUCER = 7
APPEND, THERE = MarkerVerdict(append=True), MarkerVerdict(append=False)
NOTHING = MarkerVerdict(append=False, nothing_written=True)
OLD_PRODUCER = MarkerVerdict(append=False, error=ErrorCode.INVALID_PRODUCER_EPOCH)
OLD_COORDINATOR = MarkerVerdict(append=False, error=ErrorCode.TRANSACTION_COORDINATOR_FENCED)


class Batch(NamedTuple):
    base_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int = 0
    last_offset_delta: int = 0
    max_timestamp: int = 0
    is_transactional: bool = True
    is_control: bool = False


def table(*, opened: bool, ended: bool, producer_id: int = PRODUCER) -> ProducerTable:
    """Of a producer of epoch 3, whose coordinator has epoch 5 once it has ended a transaction."""
    made = ProducerTable()
    offset = 0
    if ended:
        made.apply(Batch(0, producer_id, 3), 0)
        made.apply(Batch(1, producer_id, 3, -1, is_control=True), 0, Marker(True, 5))
        offset = 2
    if opened:
        made.apply(Batch(offset, producer_id, 3, 1 if ended else 0), 0)
    return made


def decide(known: ProducerTable, *, retiring: bool, epoch: int = 3, coordinator: int = 5) -> MarkerVerdict:
    return decide_marker(
        known, retiring=retiring, producer_id=PRODUCER, producer_epoch=epoch, coordinator_epoch=coordinator
    )


@pytest.mark.parametrize(
    ("opened", "ended", "retiring", "epoch", "coordinator", "verdict"),
    [
        (True, False, False, 3, 5, APPEND),
        (True, True, False, 3, 5, APPEND),
        (True, False, True, 3, 5, APPEND),  # also a retiring partition ends what is open
        (False, True, False, 3, 5, THERE),  # it was written before
        (False, True, True, 3, 5, THERE),
        (False, True, False, 4, 5, APPEND),  # it fences the producer's earlier epoch
        (False, True, True, 4, 5, THERE),  # a retiring log does not grow
        (False, False, False, 3, 5, NOTHING),  # the producer wrote nothing here, or long ago: nothing is open
        (False, False, False, 4, 5, NOTHING),  # and the coordinator is asked about whatever it writes next
        (False, False, True, 3, 5, NOTHING),
        (True, False, False, 2, 5, OLD_PRODUCER),
        (True, False, True, 2, 5, OLD_PRODUCER),
        (True, True, False, 3, 4, OLD_COORDINATOR),
        (False, True, True, 3, 4, OLD_COORDINATOR),
    ],
)
def test_a_marker_is_appended_once_and_by_the_newest_alone(
    opened: bool, ended: bool, retiring: bool, epoch: int, coordinator: int, verdict: MarkerVerdict
) -> None:
    assert decide(table(opened=opened, ended=ended), retiring=retiring, epoch=epoch, coordinator=coordinator) == verdict


def test_every_state_has_a_verdict_and_a_refused_marker_is_never_appended() -> None:
    for opened, ended, retiring, epoch, coordinator in product(
        (False, True), (False, True), (False, True), (2, 3, 4), (4, 5, 6)
    ):
        known = table(opened=opened, ended=ended)
        verdict = decide(known, retiring=retiring, epoch=epoch, coordinator=coordinator)
        assert not (verdict.append and verdict.error)
        if retiring and not opened:
            assert not verdict.append


def test_a_marker_that_was_appended_is_there() -> None:
    known = table(opened=True, ended=False)
    assert decide(known, retiring=False).append
    known.apply(Batch(1, PRODUCER, 3, -1, is_control=True), 0, Marker(False, 5))
    assert decide(known, retiring=False) == THERE


class Ancestor(NamedTuple):
    table: ProducerTable
    leadership: None = None


def test_a_marker_goes_where_redirected_batches_are_and_ends_what_is_open() -> None:
    alias = redirected(PRODUCER, 3)
    open_here = Ancestor(table(opened=True, ended=False, producer_id=alias))
    ended_here = Ancestor(table(opened=False, ended=True, producer_id=alias))
    of_another = Ancestor(table(opened=True, ended=False))
    both = [(ended_here, alias), (open_here, alias)]
    assert aliases(PRODUCER, 3, 2, [ended_here, open_here, of_another]) == both, "the one that ended may not be durable"
    epochs = {"producer_epoch": 4, "coordinator_epoch": 5}
    assert decide_marker(open_here.table, retiring=False, producer_id=alias, **epochs) == APPEND
    assert decide_marker(ended_here.table, retiring=False, producer_id=alias, **epochs) == THERE
    late = {"producer_epoch": 2, "coordinator_epoch": 4}
    assert decide_marker(ended_here.table, retiring=False, producer_id=alias, **late) == THERE
    assert aliases(PRODUCER, 1, 2, [open_here]) == [], "a partition of the first layout never retires for good"
    assert aliases(1 << PRODUCER_ID_BITS, 3, 2, [open_here]) == [], "an alias has no alias"
