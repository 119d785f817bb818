"""What is found in the files of a log that is not opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.runtime.disk import Disk
from anabranch.storage.log.epochs import FILE as EPOCHS_FILE
from anabranch.storage.log.survey import survey
from tests.support.batches import make_batch
from tests.unit.storage.log.test_damage import flip, open_log


def test_the_latest_epoch_is_that_of_the_last_sound_batch_where_the_file_of_epochs_is_older(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.start_epoch(1)
    log.append(make_batch(1), 1, 0)
    log.close()
    earlier = (tmp_path / "t-0" / EPOCHS_FILE).read_bytes()
    log = open_log(tmp_path)
    log.start_epoch(3)
    log.append(make_batch(1), 3, 0)
    log.close()
    (tmp_path / "t-0" / EPOCHS_FILE).write_bytes(earlier)
    assert survey(Disk(), tmp_path / "t-0").latest_epoch == 3
    file = max((tmp_path / "t-0").glob("*.log"))
    whole = file.read_bytes()
    garbage = bytearray(make_batch(1))
    garbage[:8] = (2).to_bytes(8, "big")
    garbage[12:16] = (0x7FFF_FFFF).to_bytes(4, "big")
    garbage[-1] ^= 1
    file.write_bytes(whole + garbage)
    assert survey(Disk(), tmp_path / "t-0").latest_epoch == 3, "its checksum does not hold"
    file.write_bytes(garbage)
    assert survey(Disk(), tmp_path / "t-0").latest_epoch == 1, "as the file of epochs says: no batch is sound"


def test_the_epoch_is_that_of_an_earlier_file_where_the_newest_has_no_sound_batch(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.start_epoch(7)
    log.append(make_batch(1), 7, 0)
    log.finish_segment(log.end)
    log.append(make_batch(1), 7, 0)
    log.close()
    (tmp_path / "t-0" / EPOCHS_FILE).unlink()
    newest = max((tmp_path / "t-0").glob("*.log"))
    newest.write_bytes(newest.read_bytes()[:-1])
    assert survey(Disk(), tmp_path / "t-0").latest_epoch == 7


def test_the_producer_id_of_a_batch_that_is_not_sound_counts_for_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.start_epoch(0)
    log.append(make_batch(1), 0, 0)
    log.close()
    file = max((tmp_path / "t-0").glob("*.log"))
    damaged = bytearray(file.read_bytes())
    damaged[43:51] = (2**40 - 1).to_bytes(8, "big")
    file.write_bytes(damaged)
    assert survey(Disk(), tmp_path / "t-0").producer_id == -1


def test_a_compacted_segment_without_a_name_counts_as_the_first_one(tmp_path: Path) -> None:
    """A repair that passed over it would have the log start behind it, and a start remove it."""
    log = open_log(tmp_path)
    log.start_epoch(0)
    log.append(make_batch(3, producer_id=17, producer_epoch=0, base_sequence=0), 0, 0)
    log.finish_segment(log.end)
    log.append(make_batch(1), 0, 0)
    log.close()
    oldest = min((tmp_path / "t-0").glob("*.log"))
    oldest.rename(oldest.with_name(f"{oldest.name}.swap"))
    for snapshot in (tmp_path / "t-0").glob("*.snapshot"):
        snapshot.unlink()
    found = survey(Disk(), tmp_path / "t-0")
    assert (found.first_base, found.producer_id) == (0, 17)


def test_a_compacted_segment_that_does_not_meet_the_next_one_is_left_over(tmp_path: Path) -> None:
    """What was between them is deleted: a start would refuse it."""
    log = open_log(tmp_path)
    for count in (3, 3, 1):
        log.append(make_batch(count), 0, 0)
        log.finish_segment(log.end)
    log.close()
    oldest, next_one, *_ = sorted((tmp_path / "t-0").glob("*.log"))
    oldest.rename(oldest.with_name(f"{oldest.name}.swap"))
    next_one.unlink()
    assert survey(Disk(), tmp_path / "t-0").first_base == 6


@pytest.mark.parametrize("place", [16, 23, 161 + 16, -1])
def test_a_damaged_compacted_segment_without_a_name_counts_for_it_may_be_restored(tmp_path: Path, place: int) -> None:
    """A repair that had the log start behind it would have the next start remove what was restored."""
    log = open_log(tmp_path)
    for _ in range(2):
        log.append(make_batch(2, b"v" * 100), 0, 0)
    log.finish_segment(log.end)
    log.append(make_batch(1), 0, 0)
    log.close()
    oldest = min((tmp_path / "t-0").glob("*.log"))
    swap = oldest.rename(oldest.with_name(f"{oldest.name}.swap"))
    flip(swap, place % swap.stat().st_size)
    assert survey(Disk(), tmp_path / "t-0").first_base == 0


def test_the_latest_epoch_may_be_that_of_a_compacted_segment_without_a_name(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.start_epoch(7)
    log.append(make_batch(1), 7, 0)
    log.finish_segment(log.end)
    log.close()
    (tmp_path / "t-0" / EPOCHS_FILE).unlink()
    (only,) = (tmp_path / "t-0").glob("*.log")
    only.rename(only.with_name(f"{only.name}.swap"))
    assert survey(Disk(), tmp_path / "t-0").latest_epoch == 7


@pytest.mark.parametrize("odd", [f"{5:020d}.snapshot", f"{9:020d}.log"])
def test_one_odd_file_hides_nothing_of_the_others(tmp_path: Path, odd: str) -> None:
    log = open_log(tmp_path)
    log.start_epoch(4)
    log.append(make_batch(3, producer_id=17, producer_epoch=0, base_sequence=0), 4, 0)
    log.close()
    (tmp_path / "t-0" / odd).mkdir()
    found = survey(Disk(), tmp_path / "t-0")
    assert (found.first_base, found.producer_id, found.latest_epoch) == (0, 17, 4)
