"""The data directory: one broker at a time, and whose data it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.runtime.disk import Disk, File
from anabranch.storage.checkpoints import LOG_STARTS_FILE, CheckpointError
from anabranch.storage.directory import (
    BOOT_FILE,
    RESERVE_SIZE,
    UNKNOWN_DIRECTORY,
    DataDirectory,
    DirectoryInUseError,
    Identity,
)
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.errors import OfflineLogError
from tests.support.batches import make_batch

TOPIC = TopicPartition("t", 0)


def test_a_directory_in_use_is_refused_with_who_holds_it(tmp_path: Path) -> None:
    first = DataDirectory(tmp_path / "data", Disk())
    with pytest.raises(DirectoryInUseError, match=f"process id {os.getpid()}"):
        DataDirectory(tmp_path / "data", Disk())
    first.release()
    DataDirectory(tmp_path / "data", Disk()).release()


def test_a_directory_remembers_whose_it_is(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, Disk())
    assert directory.identity(Identity("c1", 3)) == Identity("c1", 3)
    assert directory.identity(Identity("other", 3)) == Identity("c1", 3)
    with pytest.raises(AnabranchError, match=r"node 3, as meta\.properties says"):
        directory.identity(Identity("c1", 4))
    directory.release()


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        (b"version=1\n", "Restore it from a copy, or remove it"),
        (b"\xff", "Restore it from a copy, or remove it"),
        (b"version=3\ncluster.id=c1\nnode.id=3\n", "or restore the file from a copy"),
    ],
)
def test_a_damaged_identity_is_told_with_its_file_and_how_to_go_on(tmp_path: Path, data: bytes, remedy: str) -> None:
    directory = DataDirectory(tmp_path, Disk())
    (tmp_path / "meta.properties").write_bytes(data)
    with pytest.raises(AnabranchError, match=f"{tmp_path / 'meta.properties'} .*{remedy}"):
        directory.identity(Identity("c1", 3))
    directory.release()


def test_a_lock_file_that_was_removed_lets_no_second_broker_in(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, Disk())
    (tmp_path / ".lock").unlink()
    with pytest.raises(DirectoryInUseError, match=r"is in use by another broker\. Stop that broker"):
        DataDirectory(tmp_path, Disk())
    directory.release()
    DataDirectory(tmp_path, Disk()).release()


def test_logs_are_listed_and_removed_whole(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, Disk())
    for name in ("a-0", "with-dash-12", "b-1.deleted", "other", "c-\u00b2"):
        (tmp_path / name).mkdir()
    assert directory.logs() == [TopicPartition("a", 0), TopicPartition("with-dash", 12)]
    (tmp_path / ".deleted" / "0").mkdir(parents=True)
    left = directory.left_over()
    assert sorted(left) == [tmp_path / ".deleted" / "0", tmp_path / "b-1.deleted"]
    directory.remove_trees(left)
    assert not any(path.exists() for path in left) and directory.left_over() == []
    directory.remove_log(TopicPartition("a", 0))
    directory.remove_log(TopicPartition("a", 0))
    assert directory.logs() == [TopicPartition("with-dash", 12)]
    directory.release()


class NearlyFull(Disk):
    left = 1 << 40

    def free(self, path: Path) -> int:
        return self.left


def test_space_is_reserved_for_a_start_on_a_full_disk(tmp_path: Path) -> None:
    disk, reserve = NearlyFull(), tmp_path / "reserve"
    directory = DataDirectory(tmp_path, disk)
    directory.keep_reserve()
    assert reserve.stat().st_blocks * 512 >= RESERVE_SIZE
    directory.release()
    DataDirectory(tmp_path, disk).release()
    assert reserve.exists()
    disk.left = RESERVE_SIZE - 1
    directory = DataDirectory(tmp_path, disk)
    assert not reserve.exists()
    directory.keep_reserve()
    assert 2 * reserve.stat().st_size > RESERVE_SIZE, "the next start may find the disk full, too"
    with pytest.raises(DirectoryInUseError):
        DataDirectory(tmp_path, disk)
    assert reserve.exists(), "that of the broker that runs"
    disk.left = 1 << 40
    directory.keep_reserve()
    assert reserve.stat().st_blocks * 512 >= RESERVE_SIZE
    directory.release()


def test_a_broker_that_never_had_a_reserve_makes_none_on_a_nearly_full_disk(tmp_path: Path) -> None:
    disk = NearlyFull()
    disk.left = RESERVE_SIZE
    directory = DataDirectory(tmp_path, disk)
    directory.keep_reserve()
    assert not (tmp_path / "reserve").exists()
    directory.release()


class BadDisk(Disk):
    """A disk of a machine that was started again, which opens no batches while it refuses."""

    def __init__(self, boot: bytes, *, refuses: bool = False) -> None:
        super().__init__()
        self.boot = boot
        self.refuses = refuses

    def boot_id(self) -> bytes:
        return self.boot

    def open(self, path: Path, *, create: bool = False) -> File:
        if self.refuses and path.suffix == ".log":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return super().open(path, create=create)


def test_a_power_loss_is_one_for_a_log_that_could_not_be_read_at_first(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, BadDisk(b"1"))
    directory.recovered()
    log = directory.open_log(TOPIC, LogConfig())
    log.append(make_batch(1), 0, 0)
    log.flush()
    synced = log.size
    for _ in range(3):
        log.append(make_batch(1, b"v" * 5_000), 0, 0)
    directory.checkpoints.save()
    directory.release()
    (file,) = (tmp_path / "t-0").glob("*.log")
    data = bytearray(file.read_bytes())
    data[synced + 200 : synced + 4_000] = bytes(3_800)  # Nobody was told of these records.
    file.write_bytes(data)
    disk = BadDisk(b"2", refuses=True)
    directory = DataDirectory(tmp_path, disk)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            directory.open_log(TOPIC, LogConfig())
        directory.recovered()
        directory.release()
        directory = DataDirectory(tmp_path, disk)
    with pytest.raises(OSError, match="Input/output error"):
        directory.open_log(TOPIC, LogConfig())
    directory.recovered()
    disk.refuses = False
    assert directory.open_log(TOPIC, LogConfig()).end == 1
    directory.release()
    directory = DataDirectory(tmp_path, disk)
    assert not directory.machine_restarted, "all logs were read since"
    directory.release()


def test_a_kill_while_a_log_is_moved_away_leaves_no_offsets_for_one_that_is_made_again(tmp_path: Path) -> None:
    class DyingDisk(Disk):
        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            if new.parent.name == UNKNOWN_DIRECTORY:
                raise KeyboardInterrupt

    directory = DataDirectory(tmp_path, DyingDisk())
    log = directory.open_log(TOPIC, LogConfig())
    log.append(make_batch(3), 0, 0)
    log.close()
    directory.checkpoints.save()
    with pytest.raises(KeyboardInterrupt):
        directory.move_away(TOPIC)
    directory.release()
    directory = DataDirectory(tmp_path, Disk())
    assert directory.logs() == []
    assert directory.open_log(TOPIC, LogConfig()).end == 0
    directory.release()


def test_a_power_loss_is_one_for_a_log_that_was_offline_for_another_reason_at_first(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, BadDisk(b"1"))
    directory.recovered()
    other = TopicPartition("u", 0)
    for name in (TOPIC, other):
        log = directory.open_log(name, LogConfig())
        log.append(make_batch(1), 0, 0)
        log.flush()
        for _ in range(3):
            log.append(make_batch(1, b"v" * 5_000), 0, 0)
        log.note_points()
    directory.checkpoints.save()
    directory.release()
    for name in (TOPIC, other):
        (file,) = (tmp_path / str(name)).glob("*.log")
        data = bytearray(file.read_bytes())
        data[300:4_000] = bytes(3_700)
        file.write_bytes(data)
    starts = tmp_path / LOG_STARTS_FILE
    sound = starts.read_bytes()
    starts.write_bytes(sound.replace(b"t 0 0", b"t 0 1"))
    directory = DataDirectory(tmp_path, BadDisk(b"2"))
    with pytest.raises(CheckpointError):
        directory.checkpoints.known("t-0")
    with pytest.raises(OfflineLogError):
        directory.open_log(TOPIC, LogConfig())
    assert directory.open_log(other, LogConfig()).end == 1
    directory.recovered()
    directory.release()
    starts.write_bytes(sound)
    directory = DataDirectory(tmp_path, BadDisk(b"2"))
    assert directory.open_log(TOPIC, LogConfig()).end == 1
    file = max((tmp_path / "u-0").glob("*.log"))
    later = bytearray(make_batch(1))
    later[:8] = (5).to_bytes(8, "big")
    file.write_bytes(file.read_bytes() + bytes(100) + later)
    with pytest.raises(OfflineLogError):
        directory.open_log(other, LogConfig())
    directory.release()


def test_which_logs_were_not_read_since_a_power_loss_is_noted_once_for_many_and_by_any_name(tmp_path: Path) -> None:
    class CountingDisk(BadDisk):
        noted = 0

        def replace(self, path: Path, data: bytes) -> None:
            self.noted += path.name == BOOT_FILE
            super().replace(path, data)

    names = [TopicPartition("t", number) for number in range(200)]
    for each in (*map(str, names), "café-0", "a\nb-0", os.fsdecode(b"caf\xe9-0")):
        (tmp_path / each).mkdir()
    disk = CountingDisk(b"1")
    directory = DataDirectory(tmp_path, disk)
    directory.recovered()
    directory.release()
    directory = DataDirectory(tmp_path, disk)
    assert directory._unread >= {*map(str, names), "café-0", os.fsdecode(b"caf\xe9-0")}
    directory.forget_logs(names)
    assert disk.noted == 2
    directory.release()
    directory = DataDirectory(tmp_path, disk)
    assert not directory._unread & {*map(str, names)}
    directory.release()


def test_a_log_that_is_started_behind_what_was_noted_as_synced_opens(tmp_path: Path) -> None:
    """It was refused, with the advice to do again what had been done."""
    config = LogConfig(segment_bytes=1_000)
    directory = DataDirectory(tmp_path, Disk())
    directory.recovered()
    log = directory.open_log(TOPIC, config)
    log.append(make_batch(1), 0, 0)
    log.flush()
    log.checkpoint()
    directory.checkpoints.save()
    for _ in range(20):
        log.append(make_batch(1, b"v" * 300), 0, 0)
    log.flush()
    end = log.end
    directory.release()
    min((tmp_path / "t-0").glob("*.log")).unlink()
    directory = DataDirectory(tmp_path, Disk())
    with pytest.raises(OfflineLogError, match="have `anabranch repair` start the log at its first file"):
        directory.open_log(TOPIC, config)
    first = directory.survey(TOPIC).first_base
    assert first is not None and first > 1
    directory.start_log_at(TOPIC, first)
    log = directory.open_log(TOPIC, config)
    assert (log.log_start, log.end) == (first, end)
    directory.release()


def test_while_logs_are_opened_at_a_start_the_disk_is_asked_for_those_that_may_be_there(tmp_path: Path) -> None:
    class Asked(Disk):
        def __init__(self) -> None:
            super().__init__()
            self.paths: list[Path] = []

        def exists(self, path: Path) -> bool:
            self.paths.append(path)
            return super().exists(path)

    disk = Asked()
    directory = DataDirectory(tmp_path, disk)
    directory.began()
    names = [TopicPartition("t", number) for number in range(50)]
    logs = [directory.open_log(name, LogConfig()) for name in names]
    assert not [path for path in disk.paths if path.name.startswith("t-")]
    logs[0].append(make_batch(1), 0, 0)
    logs[0].flush()
    logs[0].close()
    assert directory.open_log(names[0], LogConfig()).end == 1, "it was made since"
    directory.remove_log(names[0])
    assert directory.open_log(names[0], LogConfig()).end == 0
    directory.recovered()
    disk.paths.clear()
    directory.open_log(names[1], LogConfig())
    assert tmp_path / str(names[1]) in disk.paths
    directory.release()
