"""Receiving: what each result of a fetch does to its partition, over all error codes."""

from __future__ import annotations

from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, TopicPartition
from anabranch.machines.clients.fetching import assigning, receiving
from anabranch.machines.clients.fetching.receiving import STALE
from anabranch.machines.clients.fetching.state import FetchingState, Partition
from anabranch.machines.clients.fetching.values import (
    EARLIEST,
    LATEST,
    FetcherSettings,
    FetchFrom,
    FetchResult,
    Lookup,
    TopicView,
)
from anabranch.machines.lineage import Lineage
from anabranch.records.batch import build

P0 = TopicPartition("t", 0)
ORIGIN = FetchFrom(0, 4, 1_000, UUID(int=1), 1)


def batch(offset: int, count: int, epoch: int = 4) -> bytes:
    return bytes(
        build(
            b"",
            record_count=0,
            last_offset_delta=count - 1,
            base_timestamp=0,
            max_timestamp=0,
            base_offset=offset,
            leader_epoch=epoch,
        )
    )


def world(reset: str = "earliest") -> tuple[FetchingState, Partition]:
    state = FetchingState(FetcherSettings(auto_offset_reset=reset))
    assigning.assign(state, [P0], [], awaiting=False)
    state.topics["t"].stale = False
    partition = state.partition(P0)
    partition.position = 0
    return state, partition


def take(data: bytes, origin: FetchFrom = ORIGIN) -> tuple[FetchingState, Partition]:
    state, partition = world()
    receiving.take(state, partition, origin, FetchResult(ErrorCode.NONE, memoryview(data), 9), 0)
    return state, partition


def test_whole_batches_are_held_and_the_piece_of_one_more_is_not() -> None:
    first, second = batch(0, 3), batch(3, 2)
    state, partition = take(first + second + first[:20])
    assert [(len(held.data), held.next_offset) for held in partition.held] == [(len(first + second), 5)]
    assert (partition.fetch_offset, partition.held_size, partition.high_watermark) == (5, len(first + second), 9)
    assert not state.topics["t"].stale and not state.errors


def test_batches_of_a_later_epoch_are_not_held_and_make_the_topic_stale() -> None:
    state, partition = take(batch(0, 3) + batch(3, 2, epoch=5))
    assert partition.fetch_offset == 3 and state.topics["t"].stale
    state, partition = take(batch(0, 3, epoch=5))
    assert not partition.held and state.topics["t"].stale and not state.errors


def test_on_a_stock_topic_epochs_do_not_matter() -> None:
    _, partition = take(batch(0, 3, epoch=9), FetchFrom(0, 4, 1_000, UUID(int=1), COUNT_NOT_SAID))
    assert partition.fetch_offset == 3


def test_less_than_a_batch_is_corrupt_and_nothing_at_all_is_not() -> None:
    state, partition = take(batch(0, 3)[:30])
    assert "no whole record batch at offset 0" in str(next(iter(state.errors.values()))) and not partition.held
    assert not take(b"")[0].errors


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.NONE])
def test_every_error_is_told_waited_for_or_refreshed(code: ErrorCode) -> None:
    state, partition = world()
    receiving.take(state, partition, ORIGIN, FetchResult(code), 0)
    assert not partition.held
    if code is ErrorCode.OFFSET_OUT_OF_RANGE:
        assert partition.position is None
    elif code in STALE:
        assert state.topics["t"].stale and not state.errors
    elif code.retriable and code is not ErrorCode.CORRUPT_MESSAGE:
        assert partition.retry_at_ms > 0 and not state.errors
    else:
        assert len(state.errors) == 1 and partition.retry_at_ms > 0


def test_an_offset_out_of_range_waits_until_held_batches_are_read_and_then_resets() -> None:
    state, partition = take(batch(0, 3))
    receiving.take(state, partition, ORIGIN, FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE), 0)
    assert partition.position == 0 and partition.retry_at_ms == 100
    partition.held.clear()
    receiving.take(state, partition, ORIGIN, FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE), 0)
    assert partition.position is None


@pytest.mark.parametrize("reset", ["none", "latest", "earliest"])
def test_what_was_folded_back_is_left_out_without_a_reset(reset: str) -> None:
    """The records between lie in another partition; those from the log start on are still to be read here."""
    state, partition = world(reset)
    folded = FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=7, folded=True)
    receiving.take(state, partition, ORIGIN, folded, 0)
    assert partition.position == partition.fetch_offset == 7 and not partition.paused and not state.errors


@pytest.mark.parametrize(("is_granted", "layouts", "start"), [(True, 2, 7), (False, 2, 7), (True, 1, 7), (True, 2, -1)])
def test_a_member_that_may_have_waited_at_a_gate_goes_on_behind_what_was_deleted(
    is_granted: bool, layouts: int, start: int
) -> None:
    """A reset to the latest offset would leave out what was written meanwhile."""
    state, partition = world("latest")
    lineage = Lineage.of_ends(1, [1, 2], [{0: 0}]) if layouts == 2 else Lineage.flat(1)
    partition.topic.granted = is_granted
    partition.topic.view = TopicView("t", UUID(int=1), lineage, {0: 1}, {0: 4}, elastic=True)
    receiving.take(state, partition, ORIGIN, FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=start), 0)
    goes_on = is_granted and layouts == 2 and start == 7
    assert partition.position is None and partition.wanted_timestamp == (EARLIEST if goes_on else LATEST)


def test_without_a_reset_an_offset_out_of_range_pauses_and_is_told() -> None:
    state, partition = world("none")
    receiving.take(state, partition, ORIGIN, FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE), 0)
    assert (
        partition.is_still
        and not partition.paused
        and "is not in its log, and auto.offset.reset is 'none'" in str(next(iter(state.errors.values())))
    )


@pytest.mark.parametrize(
    ("result", "position", "timestamp"),
    [
        ((ErrorCode.NONE, 7), 7, 55),
        ((ErrorCode.NONE, -1), None, LATEST),
        ((ErrorCode.LEADER_NOT_AVAILABLE, -1), None, 55),
    ],
)
def test_a_lookup_gives_a_position_the_end_or_another_try(
    result: tuple[ErrorCode, int], position: int | None, timestamp: int
) -> None:
    state, partition = world()
    partition.position, partition.wanted_timestamp, partition.looking_up = None, 55, 3
    state.lookups[3] = Lookup(3, 1, {P0: (55, 4)})
    receiving.take_found(state, 3, {P0: result}, 0)
    assert (partition.position, partition.wanted_timestamp, partition.looking_up) == (position, timestamp, 0)
    assert state.topics["t"].stale == (result[0] is not ErrorCode.NONE)


def test_a_lookup_that_was_overtaken_by_a_seek_changes_nothing() -> None:
    state, partition = world()
    partition.position = 44
    state.lookups[3] = Lookup(3, 1, {P0: (55, 4)})
    receiving.take_found(state, 3, {P0: (ErrorCode.NONE, 7)}, 0)
    assert partition.position == 44
