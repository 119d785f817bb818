"""Damage to the files of a log: nothing is deleted, and what cannot be judged is offline with a sentence."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

import pytest

from anabranch.records.batch import headers
from anabranch.runtime.disk import Disk, File
from anabranch.storage.checkpoints import LOG_STARTS_FILE, RECOVERY_POINTS_FILE, SYNCED_FILE
from anabranch.storage.log import damage
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.epochs import FILE as EPOCHS_FILE
from anabranch.storage.log.log import LocalLog, OfflineLogError
from anabranch.storage.log.recovery import CLEANER_FILE
from tests.support.batches import make_batch

SMALL = LogConfig(durability=Durability.OS, segment_bytes=1_000)
BATCH = 161
"""Bytes of each batch of `fill`."""


def open_log(path: Path, config: LogConfig = SMALL, *, power_lost: bool = False) -> LocalLog:
    return LocalLog.open(path / "t-0", config, disk=Disk(), power_lost=power_lost)


def fill(log: LocalLog, batches: int) -> None:
    for _ in range(batches):
        log.append(make_batch(2, b"v" * 100), 3, 0)


def base_offsets(log: LocalLog) -> list[int]:
    found, offset = [], log.log_start
    while part := log.read(offset, 1 << 20, end=log.end):
        for _, header in headers(part.view()):
            found.append(header.base_offset)
            offset = header.next_offset
    return found


def flip(path: Path, position: int, bit: int = 4) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)


def content(directory: Path) -> dict[str, bytes]:
    """Every byte of the log; indexes are made anew whenever that is needed."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.endswith("index")}


@pytest.mark.parametrize("place", [0, 5, 8, 11, 13 + BATCH, 16, 18, 21, 25, 57, 70, 5 * BATCH - 1])
def test_a_bit_flipped_before_sound_batches_takes_the_log_offline_and_removes_nothing(
    tmp_path: Path, place: int
) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    path = sorted((tmp_path / "t-0").glob("*.log"))[1]
    flip(path, place)
    before = content(tmp_path / "t-0")
    if place == 13 + BATCH:  # A leader epoch, which no checksum covers.
        assert open_log(tmp_path).end == 60
        return
    with pytest.raises(OfflineLogError, match=rf"{path.name}, position \d+: .* no torn tail"):
        open_log(tmp_path)
    assert content(tmp_path / "t-0") == before


@pytest.mark.parametrize("place", range(61 + 100))
def test_a_bit_flipped_in_the_last_batch_is_no_torn_tail(tmp_path: Path, place: int) -> None:
    log = open_log(tmp_path, LogConfig())
    fill(log, 3)
    path = tmp_path / "t-0" / f"{0:020d}.log"
    flip(path, 2 * BATCH + place)
    if 12 <= place < 16:
        assert open_log(tmp_path).end == 6
    else:
        with pytest.raises(OfflineLogError, match=r"whole batch|offset has changed"):
            open_log(tmp_path)


@pytest.mark.parametrize("cut", [1, 30, 100, 101, 149, 160])
def test_a_torn_tail_is_cut_and_its_bytes_are_kept(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    log = open_log(tmp_path, LogConfig())
    fill(log, 3)
    path = tmp_path / "t-0" / f"{0:020d}.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with caplog.at_level(logging.WARNING):
        assert open_log(tmp_path).end == 4
    [kept] = (tmp_path / "t-0").glob("*.torn")
    assert kept.read_bytes() == whole[2 * BATCH : -cut]
    assert kept.name in caplog.text
    assert f"position {2 * BATCH}" in caplog.text


def test_a_file_missing_among_others_takes_the_log_offline_and_removes_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    paths = sorted((tmp_path / "t-0").glob("*.log"))
    for path in paths[:3]:
        data = path.read_bytes()
        path.unlink()
        before = content(tmp_path / "t-0")
        if path is paths[0]:
            assert open_log(tmp_path).log_start == 12  # Nothing was recorded of this log yet.
        else:
            with pytest.raises(OfflineLogError, match="missing"):
                open_log(tmp_path)
            assert content(tmp_path / "t-0") == before
        path.write_bytes(data)


def test_what_was_synced_is_missed_even_at_the_end(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig())
    fill(log, 10)
    log.flush()
    log.checkpoint()
    path = tmp_path / "t-0" / f"{0:020d}.log"
    data = path.read_bytes()
    for kept in (0, 9 * BATCH, 10 * BATCH - 1):
        path.write_bytes(data[:kept])
        for power_lost in (False, True):
            with pytest.raises(OfflineLogError, match="synced"):
                open_log(tmp_path, power_lost=power_lost)
        assert path.read_bytes() == data[:kept]


def test_after_a_power_loss_unsynced_batches_behind_a_hole_are_kept_aside(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    paths = sorted((tmp_path / "t-0").glob("*.log"))
    data = bytearray(paths[1].read_bytes())
    data[BATCH : 2 * BATCH] = bytes(BATCH)
    paths[1].write_bytes(data)
    others = [path.read_bytes() for path in paths[2:]]
    log = open_log(tmp_path, power_lost=True)
    assert log.end == 14
    assert base_offsets(log) == list(range(0, 14, 2))
    kept = sorted((tmp_path / "t-0").glob("*.torn"))
    assert sorted(path.read_bytes() for path in kept) == sorted([bytes(data[BATCH:]), *others])


@pytest.mark.parametrize("name", [LOG_STARTS_FILE, RECOVERY_POINTS_FILE, SYNCED_FILE, EPOCHS_FILE])
@pytest.mark.parametrize("damage", ["flip", "empty", "cut", "remove"])
def test_a_damaged_checkpoint_deletes_nothing(tmp_path: Path, name: str, damage: str) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    log.delete_before(20)
    log.dropped.remove_at_once()
    log.flush()
    log.checkpoint()
    path = tmp_path / "t-0" / name
    data = path.read_bytes()
    told: list[str] = []
    for place in range(len(data)) if damage == "flip" else [0]:
        for bit in (1, 2, 4, 8) if damage == "flip" else [0]:
            if damage == "flip":
                flip(path, place, bit)
            elif damage == "remove":
                path.unlink()
            else:
                path.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])
            logs = {each.name: each.read_bytes() for each in (tmp_path / "t-0").glob("*.log")}
            try:
                found = open_log(tmp_path)
            except OfflineLogError as error:
                told.append(str(error))
            else:
                assert found.log_start <= 20
                assert found.end == 60
                assert base_offsets(found)[-20:] == list(range(20, 60, 2))
                assert found.epochs.latest == 3
            assert {each.name: each.read_bytes() for each in (tmp_path / "t-0").glob("*.log")} == logs
            path.write_bytes(data)
    assert all("Restore" in sentence for sentence in told)


@pytest.mark.parametrize("start", [61, 300, 1 << 40])
def test_a_log_start_behind_what_was_synced_is_damage(tmp_path: Path, start: int) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    log.flush()
    log.checkpoint()
    for name in (LOG_STARTS_FILE, RECOVERY_POINTS_FILE):
        # As earlier versions wrote them: without checksums, and without the synced offsets.
        (tmp_path / "t-0" / name).write_text(f"0\n1\nt 0 {start if name == LOG_STARTS_FILE else 54}\n")
    for without in (False, True):
        if without:
            (tmp_path / "t-0" / SYNCED_FILE).unlink()
        before = content(tmp_path / "t-0")
        with pytest.raises(OfflineLogError, match=str(start)):
            open_log(tmp_path)
        assert content(tmp_path / "t-0") == before


@pytest.mark.parametrize(
    "spoiled", [(BATCH, bytes(2 * BATCH)), (7, b"\x09"), (BATCH + 7, b"\x01"), (BATCH + 6, b"\x40")]
)
def test_a_log_that_is_cut_after_a_failed_sync_does_not_read_where_it_is_cut(
    tmp_path: Path, spoiled: tuple[int, bytes]
) -> None:
    """What the system could not write it may give back changed: the header of a damaged batch tells nothing."""
    log = open_log(tmp_path, LogConfig(durability=Durability.OS))
    fill(log, 2)
    log.flush()
    at = log.size
    fill(log, 3)
    log.end_flush(log.begin_flush(), OSError(5, "Input/output error"))
    place, data = spoiled
    (file,) = (tmp_path / "t-0").glob("*.log")
    with file.open("r+b") as opened:
        opened.seek(at + place)
        opened.write(data)
    fill(log, 1)
    log.flush()
    expected = list(range(0, 4 + 2 * (place // BATCH) + 2, 2))
    assert base_offsets(log) == expected
    assert base_offsets(open_log(tmp_path)) == expected


def test_bytes_of_a_failed_append_at_the_end_of_a_finished_segment_are_cut(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig(durability=Durability.OS))
    fill(log, 2)
    log.finish_segment(log.end)
    fill(log, 2)
    first, _ = sorted((tmp_path / "t-0").glob("*.log"))
    whole = first.read_bytes()
    first.write_bytes(whole + whole[:50])
    assert base_offsets(open_log(tmp_path)) == [0, 2, 4, 6]
    assert first.read_bytes() == whole


def test_bytes_of_a_failed_append_that_could_not_be_cut_are_cut_before_the_next_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shorter batch would cover a part of them, and sound batches lie behind it."""
    log = open_log(tmp_path)
    fill(log, 1)
    write = File.write

    def write_a_part(self: File, data: bytes | bytearray | memoryview, position: int) -> None:
        write(self, memoryview(data)[:-1], position)
        raise OSError(errno.ENOSPC, "No space left on device")

    def refuse(self: File, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(File, "truncate", refuse)
        with patch.context() as another:
            another.setattr(File, "write", write_a_part)
            with pytest.raises(OSError, match="No space"):
                log.append(bytearray(b"".join(bytes(make_batch(2, b"v" * 100)) for _ in range(3))), 3, 0)
        with pytest.raises(OSError, match="Input/output"):
            log.append(make_batch(1), 3, 0)
    log.append(make_batch(1), 3, 0)
    assert base_offsets(log) == [0, 2]
    assert base_offsets(open_log(tmp_path)) == [0, 2]


def closed_log(path: Path) -> list[Path]:
    """A log of three finished segments that was closed, so that all of it lies below the recovery point."""
    log = open_log(path)
    for _ in range(3):
        fill(log, 4)
        log.finish_segment(log.end)
    log.close()
    return sorted((path / "t-0").glob("*.log"))


@pytest.mark.parametrize("bit", range(48))
def test_a_changed_offset_of_the_last_batch_is_told_though_no_checksum_covers_it(tmp_path: Path, bit: int) -> None:
    log = open_log(tmp_path)
    fill(log, 4)
    log.close()
    (file,) = (tmp_path / "t-0").glob("*.log")
    flip(file, 3 * BATCH + 7 - bit // 8, 1 << bit % 8)
    before = content(tmp_path / "t-0")
    with pytest.raises(OfflineLogError, match=r"below the recovery point 8|was synced up to 8"):
        open_log(tmp_path)
    assert content(tmp_path / "t-0") == before


@pytest.mark.parametrize("known", [True, False])
def test_a_changed_offset_of_the_last_batch_but_one_hides_no_batch_behind_it(tmp_path: Path, known: bool) -> None:
    """It seems to end where the next file begins: what follows would be taken for bytes of an append that failed."""
    _, middle, _ = closed_log(tmp_path)
    (tmp_path / "t-0" / CLEANER_FILE).write_bytes(b"0\n0\n")
    if not known:
        (tmp_path / "t-0" / RECOVERY_POINTS_FILE).unlink()
    flip(middle, 2 * BATCH + 7, 12 ^ 14)  # It ends at 16 then, as the segment does.
    before = content(tmp_path / "t-0")
    with pytest.raises(OfflineLogError):
        open_log(tmp_path)
    assert content(tmp_path / "t-0") == before


def test_what_an_append_that_failed_has_left_is_cut_before_a_segment_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first batch is whole: at a start it would take the offset of one that was acknowledged in the next file."""
    log = open_log(tmp_path)
    fill(log, 1)
    refused = bytearray(b"".join(bytes(make_batch(2, b"v" * 100)) for _ in range(2)))
    with monkeypatch.context() as patch:
        write = File.write

        def write_a_part(self: File, data: bytes | bytearray | memoryview, position: int) -> None:
            write(self, memoryview(data)[: BATCH + 20], position)
            raise OSError(errno.ENOSPC, "No space left on device")

        def refuse(self: File, size: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(File, "write", write_a_part)
        patch.setattr(File, "truncate", refuse)
        with pytest.raises(OSError, match="No space"):
            log.append(refused, 3, 0)
        with pytest.raises(OSError, match="Input/output"):
            log.append(make_batch(1, b"w" * 1_000), 3, 0)
    log.append(make_batch(1, b"w" * 1_000), 3, 0)
    log.flush()
    assert len(log.segments) == 2
    for each in (log, open_log(tmp_path)):
        assert [header.record_count for header in each.headers_from(0)] == [2, 1]


def lengthened(log: LocalLog, count: int) -> None:
    """More batches than those whose positions a segment remembers, none of them synced; their sync fails."""
    fill(log, count)
    log.end_flush(log.begin_flush(), OSError(errno.EIO, "Input/output error"))


@pytest.mark.parametrize("damaged", [39, 10])
@pytest.mark.parametrize("durability", Durability)
def test_damage_below_the_synced_end_keeps_a_log_from_going_on_after_a_failed_sync_however_often_it_is_tried(
    tmp_path: Path, damaged: int, durability: Durability
) -> None:
    """Where the rest begins cannot be found: cut elsewhere, offsets of acknowledged records would be given again."""
    log = open_log(tmp_path, LogConfig(durability=durability, index_interval_bytes=1 << 30))
    fill(log, 40)
    log.flush()
    synced = log.flushed
    lengthened(log, 300)
    end = log.end
    (file,) = (tmp_path / "t-0").glob("*.log")
    flip(file, damaged * BATCH + 16)
    for now_ms in range(10_000, 20_000, 2_000):
        with pytest.raises(OSError, match=r"Input/output|cannot be read"):
            log.append(make_batch(1), 3, now_ms)
        assert (log.flushed, log.end, log.segments[-1].end) == (synced, end, end)
    flip(file, damaged * BATCH + 16)
    assert open_log(tmp_path).end == end


def test_a_read_of_damage_does_not_let_what_is_not_synced_count_as_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path, LogConfig(durability=Durability.FSYNC))
    fill(log, 300)
    log.flush()
    (file,) = (tmp_path / "t-0").glob("*.log")
    flip(file, 100 * BATCH + 16)
    fill(log, 1)
    with pytest.raises(OfflineLogError):
        log.read(200, 1)
    synced: list[str] = []
    sync = File.sync
    monkeypatch.setattr(File, "sync", lambda self: (synced.append(self.path.name), sync(self)))
    log.flush()
    assert file.name in synced
    with pytest.raises(OfflineLogError):
        log.read(202, 1)


def test_a_log_start_within_a_batch_is_no_damage_where_the_recovery_point_is_lost(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        log.append(make_batch(10), 3, 0)
    log.delete_before(7)
    log.close()
    (tmp_path / "t-0" / RECOVERY_POINTS_FILE).unlink()
    log = open_log(tmp_path)
    assert (log.log_start, log.end) == (7, 30)


def test_synced_batches_behind_one_whose_offset_has_changed_are_not_cut_after_a_power_loss(tmp_path: Path) -> None:
    """It seems to end at the recovery point, so that all behind it seemed not to be synced."""
    log = open_log(tmp_path, LogConfig(durability=Durability.OS))
    fill(log, 8)
    log.close()
    (file,) = (tmp_path / "t-0").glob("*.log")
    flip(file, 3 * BATCH + 7, 6 ^ 14)
    before = content(tmp_path / "t-0")
    for power_lost in (False, True):
        with pytest.raises(OfflineLogError, match="an earlier offset lies behind"):
            open_log(tmp_path, power_lost=power_lost)
    assert content(tmp_path / "t-0") == before


def test_a_clean_stop_leaves_nothing_of_an_append_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    fill(log, 1)
    write = File.write

    def write_and_fail(self: File, data: bytes | bytearray | memoryview, position: int) -> None:
        write(self, data, position)
        raise OSError(errno.EIO, "Input/output error")

    def refuse(self: File, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(File, "write", write_and_fail)
        patch.setattr(File, "truncate", refuse)
        with pytest.raises(OSError, match="Input/output"):
            log.append(make_batch(1), 3, 0)
    log.close()
    assert open_log(tmp_path).end == 2


class Reads:
    """Reads of log files, of which one may fail: the `failing`-th from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = 0
        read = File.read

        def read_or_fail(file: File, size: int, position: int) -> bytes:
            if file.path.suffix == ".log" and self.failing:
                self.failing -= 1
                if not self.failing:
                    raise OSError(errno.EIO, "Input/output error")
            return read(file, size, position)

        monkeypatch.setattr(File, "read", read_or_fail)


@pytest.mark.parametrize("failing", range(1, 8))
def test_a_read_that_fails_while_a_log_is_cut_leaves_no_earlier_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The end was sought from the index on: acknowledged records were cut, and their offsets given again."""
    log = open_log(tmp_path, LogConfig(durability=Durability.FSYNC, index_interval_bytes=1 << 30))
    log.append(make_batch(1, b"v" * 2_000), 3, 0)
    fill(log, 60)
    log.flush()
    synced = log.flushed
    fill(log, 1)
    log.end_flush(log.begin_flush(), OSError(errno.EIO, "Input/output error"))
    reads = Reads(monkeypatch)
    reads.failing = failing
    with suppress(OSError):
        log.resume(10_000)
    reads.failing = 0
    log.resume(20_000)
    assert (log.end, log.flushed, log.segments[-1].end) == (synced, synced, synced)
    fill(log, 1)
    log.flush()
    log.close()
    assert base_offsets(open_log(tmp_path)) == [0, *range(1, synced + 2, 2)]


def test_damage_before_the_cut_leaves_no_earlier_end(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig(durability=Durability.FSYNC))
    fill(log, 5)
    log.flush()
    fill(log, 1)
    log.end_flush(log.begin_flush(), OSError(errno.EIO, "Input/output error"))
    (file,) = (tmp_path / "t-0").glob("*.log")
    flip(file, 2 * BATCH + 16)
    log.resume(10_000)
    assert (log.end, log.flushed, log.segments[-1].end) == (10, 10, 10)
    fill(log, 1)
    log.flush()
    flip(file, 2 * BATCH + 16)
    assert base_offsets(open_log(tmp_path)) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_read_that_fails_while_an_index_is_built_anew_leaves_the_segment_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """It seemed to end where reading did: what followed counted as synced, and readers passed over it."""
    config = LogConfig(durability=Durability.FSYNC, index_interval_bytes=1)
    log = open_log(tmp_path, config)
    fill(log, 1_200)
    if sealed:
        log.finish_segment(log.end)
    log.close()
    flip(tmp_path / "t-0" / f"{0:020d}.index", 8 * 100 + 7)
    log = open_log(tmp_path, config)
    fill(log, 1)
    segment = log.segments[0]
    before = segment.end, segment.max_timestamp
    reads = Reads(monkeypatch)
    for failing in range(1, 50):
        reads.failing = failing
        with suppress(OSError):
            log.read(200, 500)
        reads.failing = 0
        assert (segment.end, segment.max_timestamp) == before
        if not sealed:
            assert [file.path for file in log.begin_flush().files][:1] == [segment.path]
    found = log.read(200, 500)
    assert found is not None
    assert next(headers(found.view()))[1].base_offset == 200


@pytest.mark.parametrize("bit", [4, 64])
def test_a_changed_offset_where_offsets_may_be_missing_hides_no_batch_behind_it(tmp_path: Path, bit: int) -> None:
    """All that was noted as synced is deleted, and the log may be compacted below."""
    log = open_log(tmp_path, LogConfig(durability=Durability.FSYNC))
    fill(log, 5)
    log.flush()
    log.delete_before(10)
    log.flush()
    log.checkpoint()
    fill(log, 4)
    log.flush()
    (tmp_path / "t-0" / CLEANER_FILE).write_text("")
    file = max((tmp_path / "t-0").glob("*.log"))
    assert file.stat().st_size == 4 * BATCH
    for place in (3, 1):
        flip(file, place * BATCH + 7, bit)
        before = content(tmp_path / "t-0")
        with pytest.raises(OfflineLogError, match=r"whole batch|offset has changed"):
            open_log(tmp_path)
        assert content(tmp_path / "t-0") == before
        flip(file, place * BATCH + 7, bit)
    assert open_log(tmp_path).end == 18


@pytest.mark.parametrize("torn", [100, 30])
@pytest.mark.parametrize("bit", [1, 2, 128])
@pytest.mark.parametrize("place", [0, 5, 7, 8, 9, 10, 11, 16, 18, 25, 57, 70, 150])
def test_a_bit_flipped_in_the_batch_before_a_torn_one_is_no_torn_tail(
    tmp_path: Path, place: int, bit: int, torn: int
) -> None:
    """Neither its size nor its magic is covered by its checksum, which tells of both."""
    log = open_log(tmp_path, LogConfig())
    fill(log, 4)
    file = tmp_path / "t-0" / f"{0:020d}.log"
    os.truncate(file, 3 * BATCH + torn)
    flip(file, 2 * BATCH + place, bit)
    before = content(tmp_path / "t-0")
    with pytest.raises(OfflineLogError, match=r"whole batch|offset has changed"):
        open_log(tmp_path)
    assert content(tmp_path / "t-0") == before


def test_what_looks_like_many_batches_behind_a_torn_one_takes_no_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage, "COMPARED_MAX", 100_000)
    log = open_log(tmp_path, LogConfig())
    fill(log, 1)
    head = bytearray(make_batch(1, b"v" * 10_000)[:61])
    head[7] = 5  # Its offset is one that may come.
    log.append(make_batch(1, bytes(head) * 1_000), 3, 0)
    file = tmp_path / "t-0" / f"{0:020d}.log"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(OfflineLogError, match="too much behind position"):
        open_log(tmp_path)


def test_a_read_follows_no_wrong_position_of_the_index(tmp_path: Path) -> None:
    """An answer without one whole batch let its reader ask for ever."""
    config = LogConfig(durability=Durability.OS, index_interval_bytes=1)
    log = open_log(tmp_path, config)
    for _ in range(600):
        log.append(make_batch(1, b"v" * 5_000), 3, 0)
    log.close()
    size = next(headers((tmp_path / "t-0" / f"{0:020d}.log").read_bytes()))[1].size
    flip(tmp_path / "t-0" / f"{0:020d}.index", 8 * 6 + 7, 2)
    log = open_log(tmp_path, config)
    for size_max in (6_000, 9_000, 2 * size + 2):
        found = log.read(5, size_max)
        assert found is not None
        assert found.size == size_max // size * size


def test_a_read_before_damage_is_given_as_much_as_it_asks_for_though_an_entry_of_the_index_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Building the index anew came upon the damage, and readers of what lies behind it were refused from then on."""
    config = LogConfig(durability=Durability.OS, index_interval_bytes=4_096)
    log = open_log(tmp_path, config)
    fill(log, 2_000)
    log.finish_segment(log.end)
    log.close()
    index = tmp_path / "t-0" / f"{0:020d}.index"
    flip(index, 8 * 20 + 7, 1)
    flip(tmp_path / "t-0" / f"{0:020d}.log", 1_500 * BATCH + 16)
    log = open_log(tmp_path, config)
    for _ in range(2):
        for offset, least in ((980, 1), (1_000, 1), (3_200, 10), (2_800, 20)):
            found = log.read(offset, 5_000)
            assert found is not None and found.size >= least * BATCH
            assert found.size % BATCH == 0 and found.size <= 5_000
            assert next(headers(found.view()))[1].base_offset == offset


EACH_INDEXED = LogConfig(durability=Durability.FSYNC, index_interval_bytes=1)


def built_in_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLog:
    """A log whose first segment has an index that was wrong, and built anew up to a read that failed."""
    log = open_log(path, EACH_INDEXED)
    fill(log, 1_200)
    log.finish_segment(log.end)
    fill(log, 1)
    log.close()
    flip(path / "t-0" / f"{0:020d}.index", 8 * 1_000 + 7)
    log = open_log(path, EACH_INDEXED)
    reads = Reads(monkeypatch)
    reads.failing = 5
    with pytest.raises(OSError, match="Input/output"):
        log.read(2_000, 500)
    assert 0 < len(log.segments[0].index) < 200
    return log


def test_an_index_that_a_read_kept_from_being_built_is_built_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = built_in_part(tmp_path, monkeypatch)
    segment = log.segments[0]
    assert log.read(1_000, 500) is not None
    assert len(segment.index) == 1_200
    assert segment.index_unsynced
    log.retain(0)  # What was built anew is to be synced: else the recovery point would stay before it.
    fill(log, 1)
    log.flush()
    assert not segment.index_unsynced


def test_an_index_that_was_built_as_far_as_a_read_that_failed_is_whole_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was believed for ever: each read behind its end walked over all headers from there on."""
    built_in_part(tmp_path, monkeypatch).close()
    assert len(open_log(tmp_path, EACH_INDEXED).segments[0].index) == 1_200


def test_a_log_opens_where_the_disk_does_not_take_the_index_of_a_finished_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    assert len(log.segments) > 2
    for index in (tmp_path / "t-0").glob("*index"):
        index.unlink()
    write = File.write

    def refuse(self: File, data: bytes | bytearray | memoryview, position: int) -> None:
        if self.path.suffix != ".log":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data, position)

    monkeypatch.setattr(File, "write", refuse)
    assert base_offsets(open_log(tmp_path)) == list(range(0, 60, 2))
