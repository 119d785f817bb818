"""The cleaner's checkpoint: damage to it is noticed, told and kept, and the log then has no marks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.runtime.disk import Disk
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.marks import Mark, clean_to, load_marks, note_clean, postpone_tombstones, retained_before
from anabranch.storage.log.recovery import CLEANER_FILE, may_be_compacted
from tests.support.batches import make_batch

CONFIG = LogConfig(durability=Durability.OS, segment_bytes=1_000, delete_retention_ms=1_000)
MARKS = (Mark(8, 1_700_000_000_000), Mark(12, 1_700_000_000_500))


def opened(path: Path) -> LocalLog:
    return LocalLog.open(path / "t-0", CONFIG, disk=Disk())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The checkpoint of a log that ends at offset 20."""
    log = opened(tmp_path)
    for _ in range(10):
        log.append(make_batch(2, b"v" * 100), 0, 0)
    for mark in MARKS:
        note_clean(log, mark)
    log.close()
    return tmp_path / "t-0" / CLEANER_FILE


def test_marks_are_read_as_they_were_noted(tmp_path: Path, checkpoint: Path) -> None:
    log = opened(tmp_path)
    assert tuple(load_marks(log)) == MARKS
    assert clean_to(log) == retained_before(log) == 12
    assert checkpoint.read_bytes().startswith(b"1\n2\n8 1700000000000\n12 1700000000500\n")


def test_a_checkpoint_of_version_0_is_read(tmp_path: Path, checkpoint: Path) -> None:
    checkpoint.write_bytes(b"0\n2\n8 1700000000000\n12 1700000000500\n")
    assert tuple(load_marks(opened(tmp_path))) == MARKS


def test_every_flipped_bit_is_noticed(tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lower time lets tombstones go too early, a higher offset leaves segments uncompacted for good."""
    sound = checkpoint.read_bytes()
    for bit in range(8 * len(sound)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        checkpoint.write_bytes(data)
        caplog.clear()
        log = opened(tmp_path)
        assert not load_marks(log), f"bit {bit} gives {load_marks(log)}"
        assert retained_before(log) == 0
        assert [record.levelno for record in caplog.records] == [logging.WARNING], "told once, however often it is read"
        assert str(checkpoint) in caplog.text


def test_every_cut_is_noticed(tmp_path: Path, checkpoint: Path) -> None:
    sound = checkpoint.read_bytes()
    for size in range(len(sound)):
        checkpoint.write_bytes(sound[:size])
        assert not load_marks(opened(tmp_path)), sound[:size]


@pytest.mark.parametrize(
    "text",
    [
        "0\n1\n8 5\n12 6\n",
        "0\n3\n8 5\n12 6\n",
        "0\n1\n-8 5\n",
        "0\n1\n+8 5\n",
        "0\n1\n8 5",
        "0\n1\n8  5\n",
        "0\n2\n12 5\n8 6\n",
        "2\n1\n8 5\n",
    ],
)
def test_version_0_is_believed_only_where_it_is_whole(tmp_path: Path, checkpoint: Path, text: str) -> None:
    checkpoint.write_text(text)
    assert not load_marks(opened(tmp_path))


def test_a_mark_above_the_end_of_the_log_is_damage(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.write_bytes(b"0\n1\n20 5\n")
    assert load_marks(opened(tmp_path)) == (Mark(20, 5),)
    checkpoint.write_bytes(b"0\n1\n21 5\n")
    assert not load_marks(opened(tmp_path))
    assert "21" in caplog.text and "20" in caplog.text


def odd(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def garble(path: Path) -> None:
    path.write_bytes(b"1\n1\n8 5\n00000000\n")


@pytest.mark.parametrize("damage", [garble, odd])
def test_a_damaged_checkpoint_is_kept_when_another_is_written(
    tmp_path: Path, checkpoint: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(checkpoint)
    log = opened(tmp_path)
    postpone_tombstones(log, 7)
    assert not checkpoint.with_name(CLEANER_FILE + ".damaged").exists(), "nothing was written"
    note_clean(log, Mark(16, 9))
    kept = checkpoint.with_name(CLEANER_FILE + ".damaged")
    assert kept.is_fifo() if damage is odd else kept.read_bytes() == b"1\n1\n8 5\n00000000\n"
    assert kept.name in caplog.text
    note_clean(log, Mark(18, 10))
    assert [path.name for path in kept.parent.glob("*.damaged")] == [kept.name]
    assert tuple(load_marks(opened(tmp_path))) == (Mark(16, 9), Mark(18, 10))


def test_a_log_is_known_as_compacted_while_its_damaged_checkpoint_is_replaced(tmp_path: Path, checkpoint: Path) -> None:
    """A start after a kill comes when the old file is renamed and the new one is not there yet."""
    directory = opened(tmp_path).directory
    assert may_be_compacted(Disk(), directory)
    checkpoint.rename(checkpoint.with_name(CLEANER_FILE + ".damaged"))
    assert may_be_compacted(Disk(), directory)
    checkpoint.with_name(CLEANER_FILE + ".damaged").unlink()
    assert not may_be_compacted(Disk(), directory)
