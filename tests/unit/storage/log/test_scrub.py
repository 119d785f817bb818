"""The note of a finding keeps a damaged log from being opened, also where the note itself is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.runtime.disk import Disk, OddFileError
from anabranch.storage.directory import DataDirectory
from anabranch.storage.log import scrub
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.recovery import FINDING_FILE
from tests.support.batches import make_batch
from tests.support.thorough import thorough

NAME = TopicPartition("t", 0)


class Damaged:
    """A log of which a segment below the recovery point has changed, as a scrub has noted."""

    def __init__(self, path: Path) -> None:
        self.directory = DataDirectory(path, Disk())
        log = self.open()
        for _ in range(12):
            log.append(make_batch(2, b"v" * 100), 0, 0)
        log.close()
        self.path = sorted(log.directory.glob("*.log"))[1]
        self.sound = self.path.read_bytes()
        self.note = log.directory / FINDING_FILE
        log = self.open()
        self.damage()
        (noted,) = [
            (finding, source)
            for _, source in scrub.settled(log)
            if (finding := scrub.scrub(log.disk, log.directory, source, lambda size: None)) is not None
        ]
        self.finding = noted[0]
        scrub.note(log.disk, log.directory, *noted)

    def open(self) -> LocalLog:
        return self.directory.open_log(NAME, LogConfig(durability=Durability.OS, segment_bytes=1_000))

    def damage(self) -> None:
        self.path.write_bytes(self.sound[:300] + bytes([self.sound[300] ^ 1]) + self.sound[301:])

    def restore(self) -> None:
        self.path.write_bytes(self.sound)

    def kept(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted(self.note.parent.glob("*.damaged"))]


@pytest.fixture
def damaged(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path)


def test_a_log_with_a_finding_is_offline_until_its_file_is_restored(damaged: Damaged) -> None:
    for _ in range(2):
        with pytest.raises(OfflineLogError, match=str(damaged.finding.position)):
            damaged.open()
    damaged.restore()
    assert damaged.open().end == 24
    assert not damaged.note.exists() and not damaged.kept()


def test_a_note_without_a_checksum_is_read(damaged: Damaged) -> None:
    damaged.note.write_bytes(damaged.note.read_bytes().split(b"\n")[0])
    assert json.loads(damaged.note.read_bytes())[1] == str(damaged.finding)
    with pytest.raises(OfflineLogError):
        damaged.open()
    assert not damaged.kept()


def test_a_damaged_log_is_not_served_whichever_bit_of_its_note_has_flipped(damaged: Damaged) -> None:
    """The note was removed, and with scrubs switched off nobody looked again."""
    sound = damaged.note.read_bytes()
    for bit in range(0, 8 * len(sound), thorough(1, 11)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        damaged.note.write_bytes(data)
        with pytest.raises(OfflineLogError) as raised:
            damaged.open()
        assert str(raised.value) == str(damaged.finding)
        assert damaged.note.read_bytes() == sound, "it is noted anew"
        assert damaged.kept() == [data]
        for path in damaged.note.parent.glob("*.damaged"):
            path.unlink()


@pytest.mark.parametrize("size", [0, 1, 20, -1, -9])
def test_a_note_that_was_cut_is_damaged(damaged: Damaged, size: int) -> None:
    sound = damaged.note.read_bytes()
    damaged.note.write_bytes(sound[:size])
    with pytest.raises(OfflineLogError) as raised:
        damaged.open()
    assert str(raised.value) == str(damaged.finding)
    assert damaged.note.read_bytes() == sound


def test_a_log_that_is_sound_is_served_whatever_its_note_says_and_the_note_is_kept_aside(
    damaged: Damaged, caplog: pytest.LogCaptureFixture
) -> None:
    damaged.restore()
    damaged.note.write_bytes(b"damaged")
    assert damaged.open().end == 24
    assert not damaged.note.exists() and damaged.kept() == [b"damaged"]
    assert str(damaged.note) in caplog.text
    assert damaged.open().end == 24


def test_a_kill_while_the_finding_is_noted_anew_hides_nothing(
    damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged.note.write_bytes(b"damaged")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            damaged.open()
    with pytest.raises(OfflineLogError):
        damaged.open()


def test_a_note_that_is_no_file_is_not_taken_for_none(damaged: Damaged) -> None:
    damaged.note.unlink()
    os.mkfifo(damaged.note)
    with pytest.raises(OddFileError):
        damaged.open()
    assert damaged.note.is_fifo()


def test_a_segment_with_offsets_missing_is_sound_and_one_with_a_changed_base_offset_is_not(tmp_path: Path) -> None:
    """A log may have been compacted for another one, and not say so."""
    log = LocalLog.open(tmp_path / "t-0", LogConfig(durability=Durability.OS), disk=Disk())
    for _ in range(3):
        log.append(make_batch(1, b"v" * 100), 0, 0)
    log.finish_segment(log.end)
    log.flush()
    file = log.segments[0].path
    sound = file.read_bytes()
    size = len(sound) // 3

    def found(data: bytes) -> scrub.Finding | None:
        file.write_bytes(data)
        return scrub.scrub(log.disk, log.directory, scrub.Source(0, 3, len(data)), lambda size: None)

    assert found(sound[:size] + sound[2 * size :]) is None
    for batch in range(3):
        for bit in range(64):
            changed = bytearray(sound)
            changed[batch * size + bit // 8] ^= 1 << bit % 8
            assert found(bytes(changed)) is not None
