"""Leader epochs of a log: both columns grow, ends are answered as KIP-279 says, and torn files are noticed."""

from __future__ import annotations

import pytest

from anabranch.storage.log.epochs import LeaderEpochs

KNOWN = [(1, 10), (3, 20), (7, 50)]


def test_an_epoch_begins_once_and_only_above_the_latest() -> None:
    epochs = LeaderEpochs(KNOWN)
    assert not epochs.start(7, 60) and not epochs.start(2, 60)
    assert epochs.start(8, 60) and epochs.latest == 8


def test_an_epoch_without_a_record_is_replaced_by_the_next() -> None:
    epochs = LeaderEpochs(KNOWN)
    assert epochs.start(9, 50)
    assert epochs.entries == [(1, 10), (3, 20), (9, 50)]
    assert epochs.end_of(8, log_end=70) == epochs.end_of(3, log_end=70) == (3, 50)


@pytest.mark.parametrize(
    ("epoch", "end"),
    [(-1, (-1, -1)), (0, (0, 10)), (1, (1, 20)), (2, (1, 20)), (3, (3, 50)), (7, (7, 70)), (8, (-1, -1))],
)
def test_the_end_of_an_epoch_is_where_the_next_one_began(epoch: int, end: tuple[int, int]) -> None:
    assert LeaderEpochs(KNOWN).end_of(epoch, log_end=70) == end


@pytest.mark.parametrize(("offset", "epoch"), [(9, -1), (10, 1), (19, 1), (20, 3), (50, 7), (1_000, 7)])
def test_every_record_has_the_epoch_it_was_appended_under(offset: int, epoch: int) -> None:
    assert LeaderEpochs(KNOWN).epoch_at(offset) == epoch


def test_cutting_the_tail_and_the_head() -> None:
    epochs = LeaderEpochs(KNOWN)
    epochs.truncate_from(50)
    assert epochs.entries == [(1, 10), (3, 20)]
    epochs.truncate_before(15)
    assert epochs.entries == [(1, 15), (3, 20)]
    epochs.truncate_before(30)
    assert epochs.entries == [(3, 30)]


def test_the_file_is_read_back_and_a_torn_one_is_refused() -> None:
    data = LeaderEpochs(KNOWN).to_bytes()
    assert LeaderEpochs.from_bytes(data).entries == KNOWN
    assert LeaderEpochs.from_bytes(LeaderEpochs().to_bytes()).entries == []
    for size in range(len(data)):
        with pytest.raises(ValueError):
            LeaderEpochs.from_bytes(data[:size])
