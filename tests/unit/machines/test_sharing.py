"""Who is served by a pass over a shared partition, and what is kept for whom."""

from __future__ import annotations

from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.layouts import Layout
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts, interval
from anabranch.machines.lineage import Cuts
from anabranch.machines.partition.sharing import (
    ASKED_LATELY_MS,
    KEYS_MAX,
    PASS_RANGES_MAX,
    RANGES_MAX,
    SHARERS_MAX,
    TARGETS_MAX,
    Asked,
    KeptPieces,
    Log,
    Piece,
    Sharers,
    asked_of,
    disjoint,
    selection_of,
    stretch_of,
)
from anabranch.records.batch import headers
from tests.properties import record_model as model

LOG = Log(UUID(int=1), 0, 3)
ONE, TWO, THREE = (Asked((share,)) for share in cuts(SPACE, 3))
ACROSS = Asked((Interval(5, SPACE_END),))


def batches(*offsets: int) -> memoryview:
    """Batches of one record, at these offsets."""
    rows = (model.Row(offset, 1, b"k", b"v") for offset in offsets)
    return memoryview(b"".join(model.encode(model.Batch(row.offset, (row,))) for row in rows))


SIZE = len(batches(0))


def offsets(piece: Piece) -> list[int]:
    """The base offsets of a piece."""
    return [header.base_offset for _, header in headers(piece.data)]


@pytest.mark.parametrize(
    "ranges", [[(5, 4)], [(-1, 3)], [(0, SPACE_END + 1)], [(0, 9), (9, 12)], [(i, i) for i in range(RANGES_MAX + 1)]]
)
def test_ranges_that_are_none_are_refused(ranges: list[tuple[int, int]]) -> None:
    assert asked_of(ranges) is ErrorCode.INVALID_REQUEST


def test_what_is_asked_for_is_bounded() -> None:
    assert asked_of([], [b"k"] * (KEYS_MAX + 1)) is ErrorCode.INVALID_REQUEST
    assert asked_of([], [], [b"k" * 70_000]) is ErrorCode.INVALID_REQUEST
    assert asked_of([], size_min=5, size_max=4) is ErrorCode.INVALID_REQUEST
    assert asked_of([]) == Asked()
    assert asked_of([(7, 9), (1, 2)]) == Asked((Interval(1, 2), Interval(7, 9)))


def test_a_pass_serves_those_who_have_not_read_that_far() -> None:
    sharers = Sharers()
    for asked, offset in ((ONE, 10), (TWO, 10), (THREE, 11)):
        sharers.began(asked, offset, 0)
    assert list(sharers.others(ONE, 10, 0, idle=False)) == [TWO]
    assert list(sharers.others(ONE, 11, 0, idle=False)) == [THREE, TWO]
    sharers.reached(TWO, 12)
    assert list(sharers.others(ONE, 11, 0, idle=False)) == [THREE]
    sharers.began(TWO, 5, 0)
    assert list(sharers.others(ONE, 5, 0, idle=False)) == [TWO], "it went back"


def test_those_without_a_fetch_are_served_where_records_are_kept_for_them_and_not_for_long() -> None:
    sharers = Sharers()
    sharers.began(TWO, 0, 1_000)
    sharers.ended(TWO)
    assert not list(sharers.others(ONE, 0, 1_000, idle=False))
    assert list(sharers.others(ONE, 0, 1_000 + ASKED_LATELY_MS, idle=True)) == [TWO]
    assert not list(sharers.others(ONE, 0, 1_001 + ASKED_LATELY_MS, idle=True))


def test_other_filters_are_served_alone() -> None:
    sharers = Sharers()
    filtered = ONE._replace(keys_wanted=(b"k",))
    sharers.began(filtered, 0, 0)
    sharers.began(TWO, 0, 0)
    assert not list(sharers.others(filtered, 0, 0, idle=True))
    assert not list(sharers.others(TWO, 0, 0, idle=True))


def test_ranges_of_one_pass_do_not_overlap() -> None:
    assert disjoint(ONE, [ACROSS, TWO, ONE, THREE]) == [ONE, TWO, THREE]
    assert disjoint(ACROSS, [ONE, TWO]) == [ACROSS]
    many = [Asked((share,)) for share in cuts(SPACE, 2 * TARGETS_MAX)]
    assert len(disjoint(many[0], many[1:])) == TARGETS_MAX
    cells = selection_of([TWO, ONE]).cells
    assert [cell.target for cell in cells] == [1, 0]
    assert cells[0].last + 1 == cells[1].start


def test_a_bounded_number_of_sharers_is_remembered_those_that_wait_among_them() -> None:
    sharers = Sharers()
    many = [Asked((Interval(place, place),)) for place in range(SHARERS_MAX + 5)]
    for asked in many:
        sharers.began(asked, 0, 0)
        if asked is not many[0]:
            sharers.ended(asked)
    assert len(sharers) == SHARERS_MAX
    assert many[0] in list(sharers.others(ONE._replace(ranges=(Interval(9_999, 9_999),)), 0, 0, idle=False))


def test_a_piece_is_divided_at_batches() -> None:
    piece = Piece(3, 20, batches(4, 7, 9, 15))
    part, rest = piece.part(3, 20, 10 * SIZE)
    assert (part, rest) == (piece, None)
    part, rest = piece.part(3, 20, 2 * SIZE)
    assert rest is not None
    assert (part[:2], offsets(part), rest[:2], offsets(rest)) == ((3, 9), [4, 7], (9, 20), [9, 15])
    part, rest = piece.part(8, 20, 0)
    assert rest is not None
    assert (part[:2], offsets(part), rest[:2], offsets(rest)) == ((8, 15), [9], (15, 20), [15])
    part, rest = piece.part(3, 8, 10 * SIZE)
    assert rest is not None
    assert (part[:2], offsets(part), rest[:2], offsets(rest)) == ((3, 8), [4, 7], (8, 20), [9, 15])
    part, rest = piece.part(16, 18, 10 * SIZE)
    assert rest is not None
    assert (part[:2], offsets(part), rest[:2], offsets(rest)) == ((16, 18), [], (18, 20), [])


def test_a_piece_goes_when_it_is_taken_and_with_it_those_before() -> None:
    kept = KeptPieces(1 << 20)
    for start in (0, 10, 20):
        kept.keep(LOG, ONE, Piece(start, start + 10, batches(start)))
    kept.keep(LOG, TWO, Piece(10, 20, batches(11)))
    assert kept.take(LOG._replace(leader_epoch=4), ONE, 10) is None
    found = kept.take(LOG, ONE, 15)
    assert found is not None
    assert offsets(found) == [10]
    assert kept.take(LOG, ONE, 15) is None
    assert kept.take(LOG, ONE, 5) is None, "behind it"
    assert kept.take(LOG, TWO, 10) is not None
    assert kept.take(LOG, ONE, 20) is not None
    assert kept.size == 0


def test_what_is_kept_is_bounded_and_the_oldest_goes() -> None:
    cost = SIZE + ONE.size
    kept = KeptPieces(4 * cost)
    for start in range(10):
        kept.keep(LOG, ONE, Piece(start, start + 1, batches(start)))
        assert kept.size <= 4 * cost
    assert kept.evictions == 6
    assert kept.take(LOG, ONE, 5) is None
    assert kept.take(LOG, ONE, 6) is not None
    kept.keep(LOG, ONE, Piece(0, 99, batches(*range(99))))
    assert kept.take(LOG, ONE, 0) is None, "too large"
    kept.forget(LOG.topic_id, {LOG.partition})
    assert kept.size == 0


def test_nobody_is_kept_more_than_a_part_of_all() -> None:
    kept = KeptPieces(8 * SIZE + ONE.size)
    assert kept.room_for(LOG, ONE)
    kept.keep(LOG, ONE, Piece(0, 10, batches(*range(6))))
    assert not kept.room_for(LOG, ONE)
    assert kept.room_for(LOG, TWO)


def test_keyless_records_are_spread_over_what_the_partition_held_then() -> None:
    layouts = (Layout(0, 2), Layout(1, 4), Layout(2, 2))
    topic = Topic("t", LOG.topic_id, {0: (0,), 1: (0,), 2: (0,)}, 2, layouts)
    known = Cuts([0, 1], [100, 200])
    assert stretch_of(topic, 0, known, 99) == (2, interval(0, 2, 2), 100)
    assert stretch_of(topic, 0, known, 100) == (2, interval(0, 4, 2), 200)
    assert stretch_of(topic, 0, known, 200) == (2, interval(0, 2, 2), None)
    assert stretch_of(topic, 2, Cuts([1], [50]), 10) == (2, interval(2, 4, 2), 50)
    assert stretch_of(topic, 2, Cuts([1], [50]), 50) == (2, SPACE, None), "retiring"


def test_askers_that_have_one_place_in_common_are_not_served_together() -> None:
    first = Asked((Interval(0, 9), Interval(30, 39)))
    within, touching = Asked((Interval(10, 29),)), Asked((Interval(20, 30),))
    assert disjoint(first, [within]) == [first, within]
    assert disjoint(first, [touching, within]) == [first, within]
    assert disjoint(within, [touching, first]) == [within, first]


def test_a_pass_serves_only_so_many_ranges() -> None:
    def many(first: int, count: int) -> Asked:
        return Asked(tuple(Interval(place, place) for place in range(first, first + 2 * count, 2)))

    half, rest, one = many(0, PASS_RANGES_MAX // 2), many(1, PASS_RANGES_MAX // 2), many(10**6, 1)
    assert disjoint(half, [rest, one]) == [half, rest]
    assert disjoint(half, [many(1, PASS_RANGES_MAX // 2 + 1), one]) == [half, one]
