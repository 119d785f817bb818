"""The cuts of a partition: derived from the epochs of its log and the runs of epochs that ended, and as on the wire."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.base.errors import DecodeError
from anabranch.machines.controller.layouts import EndedEpochs, EpochRun, Layout, above, ended_epoch, kept, with_ended
from anabranch.machines.cuts import (
    NO_CUTS,
    behind,
    below,
    cuts_after,
    decode_cuts,
    encode_cuts,
    joined,
    lineage_of,
    newest_segments,
    since,
)
from anabranch.machines.lineage import Cuts
from anabranch.storage.log.epochs import LeaderEpochs


def pairs(cuts: Cuts) -> list[tuple[int, int]]:
    return list(zip(*cuts, strict=True))


def cuts(*of: tuple[int, int]) -> Cuts:
    return Cuts(array("q", (layout for layout, _ in of)), array("q", (end for _, end in of)))


class History:
    """A partition through resizes, appends, unclean starts and deletions, with the slow answer beside it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.epoch = self.layout = chance.randrange(3)
        self.epochs = LeaderEpochs([(self.epoch, 0)])
        self.ended: EndedEpochs = {}
        self.end = self.start = 0
        self.all_ends: dict[int, int] = {}
        """Layout to the log end when it ended."""

    def step(self) -> None:
        match self.chance.choice(("append", "append", "resize", "resize", "unclean", "delete")):
            case "append":
                self.end += self.chance.randrange(1, 5)
            case "resize":
                self.ended = with_ended(self.ended, self.layout, {0: self.epoch})
                self.all_ends[self.layout] = self.end
                self.layout += 1
                self.begin_epoch()
            case "unclean":
                self.begin_epoch()
            case "delete":
                self.start = self.chance.randrange(self.start, self.end + 1)
                self.epochs.truncate_before(self.start)

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.epochs.start(self.epoch, self.end)

    def expected(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        last = self.start
        for layout, end in self.all_ends.items():
            if end > last:
                found.append((layout, end))
                last = end
        return found


@given(st.randoms(use_true_random=False))
def test_cuts_are_the_ends_of_all_ended_segments_with_records_however_often_they_are_asked_for(
    chance: random.Random,
) -> None:
    history, known = History(chance), NO_CUTS
    for _ in range(30):
        history.step()
        runs = history.ended.get(0, ())
        if chance.random() < 0.4:
            known = behind(known, history.start)
            done = known.ends[-1] if known.ends else history.start
            known = cuts_after(known, runs, history.layout, history.epochs.since(done), history.end)
            assert pairs(known) == history.expected()
        whole = cuts_after(NO_CUTS, runs, history.layout, history.epochs.since(history.start), history.end)
        assert pairs(whole) == history.expected()
        for layout, end in history.all_ends.items():
            epoch = ended_epoch(runs, layout)
            assert epoch is not None
            told = history.epochs.end_of(epoch, history.end)[1]
            assert max(told, history.start) == max(end, history.start), "as OffsetForLeaderEpoch says"


def test_a_layout_that_is_ending_is_not_cut_yet() -> None:
    """The controller has noted the epoch that ends with it, and the log may still grow."""
    ended = with_ended(with_ended({}, 0, {0: 0}), 1, {0: 1})
    epochs = LeaderEpochs([(0, 0), (1, 4), (2, 9)])
    assert pairs(cuts_after(NO_CUTS, ended[0], 1, epochs.since(0), 12)) == [(0, 4)]
    assert pairs(cuts_after(NO_CUTS, ended[0], 2, epochs.since(0), 12)) == [(0, 4), (1, 9)]


def test_epochs_of_every_resize_are_one_run_and_a_skipped_one_begins_another() -> None:
    ended: EndedEpochs = {}
    for layout in range(1_000):
        ended = with_ended(ended, layout, {0: layout, 1: layout + (layout >= 600)})
    assert ended == {0: (EpochRun(0, 0, 1_000),), 1: (EpochRun(0, 0, 600), EpochRun(600, 601, 400))}
    assert ended_epoch(ended[1], 599) == 599
    assert ended_epoch(ended[1], 600) == 601
    assert ended_epoch(ended[1], 1_000) is None
    assert above(ended, 700) == {0: (EpochRun(700, 700, 300),), 1: (EpochRun(700, 701, 300),)}
    assert above(ended, 1_000) == {}


def test_an_epoch_that_ends_again_with_the_same_layout_replaces_the_one_before() -> None:
    ended = with_ended(with_ended({}, 3, {0: 7}), 4, {0: 8})
    assert with_ended(ended, 4, {0: 9}) == {0: (EpochRun(3, 7, 1), EpochRun(4, 9, 1))}


def test_layouts_without_records_are_folded_and_the_others_keep_their_numbers() -> None:
    layouts = tuple(Layout(number, 2 + number % 3) for number in range(6))
    left = kept(layouts, {1, 3}, 4)
    assert [layout.number for layout in left] == [1, 3, 4, 5]
    lineage = lineage_of(2, left, {0: cuts((1, 5), (3, 8))}, {})
    assert (lineage.first, lineage.current, lineage.counts) == (1, 5, (3, 3, 2, 3, 4))
    assert [lineage.layout_at(0, offset) for offset in (0, 4, 5, 7, 8)] == [1, 1, 3, 3, 5]


def test_cuts_are_sliced_by_layout_and_by_log_start() -> None:
    some = cuts((1, 10), (4, 20), (5, 25))
    assert pairs(behind(some, 10)) == [(4, 20), (5, 25)]
    assert behind(some, 9) is some
    assert pairs(below(some, 5)) == [(1, 10), (4, 20)]
    assert pairs(since(some, 2)) == [(4, 20), (5, 25)]
    assert pairs(joined(some, cuts((7, 30)))) == [(1, 10), (4, 20), (5, 25), (7, 30)]
    assert pairs(some) == [(1, 10), (4, 20), (5, 25)], "nothing is changed in place"


@given(st.lists(st.integers(0, 1 << 40), unique=True, max_size=100).map(sorted))
def test_cuts_are_read_as_they_were_written(ends: list[int]) -> None:
    some = cuts(*enumerate(ends))
    assert decode_cuts(*encode_cuts(some)) == some


@pytest.mark.parametrize(
    ("layouts", "ends", "why"),
    [
        (b"1234567", b"", "no numbers of 64 bits"),
        (bytes(8), b"", "1 layouts have 0 ends"),
        (bytes(16), bytes(16), "do not ascend"),
        ((0).to_bytes(8) + (1).to_bytes(8), (5).to_bytes(8) + (5).to_bytes(8), "do not ascend"),
        (b"\xff" * 8, bytes(8), "do not ascend"),
        (b"".join(n.to_bytes(8) for n in range(100)), b"".join((n % 99).to_bytes(8) for n in range(100)), "do not"),
    ],
)
def test_bytes_that_are_no_cuts_are_refused(layouts: bytes, ends: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        decode_cuts(layouts, ends)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_any_bytes_are_cuts_or_an_error(layouts: bytes, ends: bytes) -> None:
    try:
        found = decode_cuts(layouts, ends)
    except DecodeError:
        return
    assert encode_cuts(found) == (layouts, ends)


def test_the_newest_segments_are_those_that_a_lineage_ends_with() -> None:
    lineage = lineage_of(1, [Layout(n, 1 + n % 2) for n in range(9)], {0: cuts((1, 10), (4, 20), (5, 25), (7, 26))}, {})
    for log_start in (0, 5, 10, 21, 26, 40):
        whole = tuple(lineage.segments(0, log_start))
        for most in range(1, 7):
            assert newest_segments(lineage, 0, log_start, most) == (whole[-most:], len(whole))
    assert newest_segments(lineage, 1, 3, 5) == (tuple(lineage.segments(1, 3)), 1)
