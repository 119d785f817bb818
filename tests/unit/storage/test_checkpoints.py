"""The checkpoint files."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from anabranch.runtime.disk import Disk, File
from anabranch.storage.checkpoints import (
    LOG_STARTS_FILE,
    RECOVERY_POINTS_FILE,
    SYNCED_FILE,
    CheckpointError,
    Checkpoints,
)


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.record("flights-1", log_start=5, recovery_point=70)
    checkpoints.record("with-dash-0", log_start=0, recovery_point=3, synced=4)
    checkpoints.save()
    assert _offsets(tmp_path / RECOVERY_POINTS_FILE) == "1\n2\nflights 1 70\nwith-dash 0 3\n"
    assert _offsets(tmp_path / LOG_STARTS_FILE) == "1\n2\nflights 1 5\nwith-dash 0 0\n"
    assert _offsets(tmp_path / SYNCED_FILE) == "1\n1\nwith-dash 0 4\n"
    again = Checkpoints(Disk(), tmp_path)
    assert (again.log_start("flights-1"), again.recovery_point("flights-1")) == (5, 70)
    assert (again.log_start("with-dash-0"), again.recovery_point("with-dash-0")) == (0, 3)
    assert (again.synced("with-dash-0"), again.synced("flights-1")) == (4, None)
    again.forget("flights-1")
    again.save()
    assert Checkpoints(Disk(), tmp_path).recovery_point("flights-1") is None


def test_nothing_is_written_without_news(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.save()
    assert list(tmp_path.iterdir()) == []
    checkpoints.record("a-0", recovery_point=1)
    checkpoints.save()
    (tmp_path / RECOVERY_POINTS_FILE).unlink()
    checkpoints.record("a-0", recovery_point=1)
    checkpoints.save()
    assert list(tmp_path.iterdir()) == []


def test_a_log_start_is_known_to_be_saved_once_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.record("a-0", log_start=1)
    checkpoints.record("b-0", log_start=1)
    assert not checkpoints.has_saved("a-0", 1), "it was not saved yet"
    checkpoints.save()
    assert checkpoints.has_saved("a-0", 1)
    assert not checkpoints.has_saved("a-0", 0)
    checkpoints.record("a-0", log_start=2)
    assert not checkpoints.has_saved("a-0", 2)
    assert checkpoints.has_saved("b-0", 1)
    replace, found = Disk.replace, list[bool]()

    def look_and_replace(disk: Disk, path: Path, data: bytes) -> None:
        found.append(checkpoints.has_saved("a-0", 2))
        replace(disk, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "replace", look_and_replace)
        checkpoints.save()
    assert found == [False], "it is being saved"
    assert checkpoints.has_saved("a-0", 2)
    checkpoints.record("a-0", log_start=3)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", _refuse)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save()
    assert not checkpoints.has_saved("a-0", 3)
    checkpoints.record("a-0", log_start=2)
    assert not checkpoints.has_saved("a-0", 2), "nobody knows which of the two the file has"
    checkpoints.save()
    assert checkpoints.has_saved("a-0", 2)


def test_what_could_not_be_saved_is_still_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.record("a-0", recovery_point=1)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", _refuse)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save()
    checkpoints.save()
    assert Checkpoints(Disk(), tmp_path).recovery_point("a-0") == 1


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    (tmp_path / LOG_STARTS_FILE).write_text("0\n2\nflights 1 5\nwith-dash 0 0\n")
    checkpoints = Checkpoints(Disk(), tmp_path)
    assert (checkpoints.log_start("flights-1"), checkpoints.log_start("with-dash-0")) == (5, 0)
    assert checkpoints.log_start("other-0") is None


@pytest.mark.parametrize("text", ["", "0\n", "0\n2\na 0 1\n", "2\n0\n", "0\n1\na 0\n", "0\n1\na 0 x\n", "\xff"])
def test_a_log_start_that_is_lost_is_refused_and_the_damaged_file_is_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / LOG_STARTS_FILE).write_bytes(text.encode("latin-1"))
    checkpoints = Checkpoints(Disk(), tmp_path)
    with pytest.raises(CheckpointError, match="Restore the file"):
        checkpoints.log_start("a-0")
    checkpoints.record("a-0", log_start=3)
    checkpoints.save()
    assert Checkpoints(Disk(), tmp_path).log_start("a-0") == 3
    kept = [path.read_bytes() for path in tmp_path.glob(f"{LOG_STARTS_FILE}*.damaged")]
    assert kept == ([text.encode("latin-1")] if text else [])


class _KilledError(Exception):
    pass


class _KillingDisk(Disk):
    """A disk that replaces so many files, and then the process is killed."""

    def __init__(self, replaced_max: int) -> None:
        self.left = replaced_max

    def replace(self, path: Path, data: bytes) -> None:
        if not self.left:
            raise _KilledError
        self.left -= 1
        super().replace(path, data)


@pytest.mark.parametrize("replaced", range(5))
def test_a_kill_between_the_files_leaves_no_contradiction(tmp_path: Path, replaced: int) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.record("moved-0", log_start=3, recovery_point=4, synced=5)
    checkpoints.record("gone-0", log_start=3, recovery_point=4, synced=5)
    checkpoints.save()

    checkpoints = Checkpoints(disk := _KillingDisk(replaced), tmp_path)
    checkpoints.record("moved-0", log_start=9, recovery_point=9, synced=10)
    checkpoints.record("new-0", log_start=100, recovery_point=100, synced=101)
    checkpoints.forget("gone-0")
    with contextlib.suppress(_KilledError):
        checkpoints.save()

    after = Checkpoints(Disk(), tmp_path)
    for name in ("moved-0", "gone-0", "new-0"):
        log_start, recovery_point, synced = after.known(name)  # No CheckpointError: the start of each is known.
        assert synced is None or (log_start is not None and log_start <= max(synced, recovery_point or 0)), name
    if disk.left:
        assert after.known("moved-0") == (9, 9, 10)
        assert after.known("gone-0") == (None, None, None)
        assert after.known("new-0") == (100, 100, 101)


class _BusyDisk(_KillingDisk):
    """A disk during whose writes another thread makes a log."""

    def __init__(self, replaced_max: int) -> None:
        super().__init__(replaced_max)
        self.checkpoints: Checkpoints | None = None

    def replace(self, path: Path, data: bytes) -> None:
        super().replace(path, data)
        if self.checkpoints is not None:
            self.checkpoints.record(f"new-{self.left}", log_start=5, recovery_point=6, synced=7)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("replaced", range(1, 5))
def test_a_log_that_is_made_while_the_files_are_written_is_in_all_of_them_or_in_none(
    tmp_path: Path, replaced: int, moves: bool
) -> None:
    """A kill before the next save left a recovery point without a log start, and took the new log offline."""
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.record("old-0", log_start=1, recovery_point=2, synced=2)
    checkpoints.save()
    checkpoints = Checkpoints(disk := _BusyDisk(replaced), tmp_path)
    disk.checkpoints = checkpoints
    checkpoints.record("old-0", log_start=2 if moves else None, recovery_point=4, synced=4)
    with contextlib.suppress(_KilledError):
        checkpoints.save()
        checkpoints.save()
    after = Checkpoints(Disk(), tmp_path)
    for name in after.names():
        assert after.known(name).log_start is not None  # No CheckpointError: the start of each is known.


def test_starts_that_moved_are_saved_alone_when_nothing_else_has_changed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(disk := _KillingDisk(3), tmp_path)
    checkpoints.record("a-0", log_start=0, recovery_point=9, synced=9)
    checkpoints.save()
    disk.left = 1
    checkpoints.record("a-0", log_start=7)
    checkpoints.save()
    assert Checkpoints(Disk(), tmp_path).known("a-0") == (7, 9, 9)


def test_a_start_that_moved_and_could_not_be_saved_is_still_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(disk := _KillingDisk(3), tmp_path)
    checkpoints.record("a-0", log_start=0, recovery_point=2, synced=2)
    checkpoints.save()
    disk.left = 9
    checkpoints.record("a-0", log_start=7, recovery_point=9, synced=9)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", _refuse)
            with pytest.raises(OSError, match="No space"):
                checkpoints.save()
        after = Checkpoints(Disk(), tmp_path)
        assert after.known("a-0") == (0, 2, 2)
    checkpoints.save()
    assert Checkpoints(Disk(), tmp_path).known("a-0") == (7, 9, 9)


def test_a_damaged_entry_concerns_its_log_only(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    for number in range(3):
        checkpoints.record(f"a-{number}", log_start=10 + number)
    checkpoints.save()
    path = tmp_path / LOG_STARTS_FILE
    path.write_text(path.read_text().replace("a 1 11", "a 1 91"))
    checkpoints = Checkpoints(Disk(), tmp_path)
    assert (checkpoints.log_start("a-0"), checkpoints.log_start("a-2")) == (10, 12)
    with pytest.raises(CheckpointError, match="a 1 91"):
        checkpoints.log_start("a-1")


def _offsets(path: Path) -> str:
    """The content without the checksum of each entry."""
    lines = path.read_text().split("\n")
    return "\n".join(line.rpartition(" ")[0] if line.count(" ") == 3 else line for line in lines)


def _refuse(fd: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_damaged_file_is_kept_once_and_at_each_moment_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    for name in ("a-0", "b-0"):
        checkpoints.record(name, log_start=3, recovery_point=6, synced=6)
    checkpoints.save()
    path = tmp_path / LOG_STARTS_FILE
    damaged = path.read_bytes().replace(b"a 0 3", b"a 0 7")
    path.write_bytes(damaged)
    checkpoints = Checkpoints(Disk(), tmp_path)
    replace, seen = Disk.replace, list[Path]()

    def replaced(self: Disk, file: Path, data: bytes) -> None:
        assert file.exists(), "a kill would leave no log with a start that is known"
        seen.append(file)
        replace(self, file, data)

    monkeypatch.setattr(Disk, "replace", replaced)
    for start in (4, 5, 6):
        checkpoints.record("b-0", log_start=start)
        checkpoints.save()
    assert seen == [path] * 3
    (kept,) = tmp_path.glob("*.damaged")
    assert kept.read_bytes() == damaged
    again = Checkpoints(Disk(), tmp_path)
    assert again.log_start("b-0") == 6
    with pytest.raises(CheckpointError):
        again.log_start("a-0")


def test_an_offset_that_may_be_higher_in_the_file_is_above_until_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.record("a-0", synced=6)
    checkpoints.save()
    assert checkpoints.go_above("a-0", 5)
    assert not checkpoints.go_above("a-0", 6)
    assert not checkpoints.go_above("b-0", 0)
    checkpoints.record("a-0", synced=4)
    assert checkpoints.go_above("a-0", 4)

    def refuse(self: Disk, file: Path, data: bytes) -> None:
        assert checkpoints.go_above("a-0", 4), "it is not in the file yet"
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr(Disk, "replace", refuse)
        checkpoints.save()
    assert checkpoints.go_above("a-0", 4)
    checkpoints.save()
    assert not checkpoints.go_above("a-0", 4)


def test_a_damaged_file_that_cannot_be_copied_leaves_no_parts_of_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / SYNCED_FILE).write_text("1\n1\na 0 5 00000000\n")
    checkpoints = Checkpoints(Disk(), tmp_path)

    def refuse(self: File, data: bytes, position: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(File, "write", refuse)
        for offset in range(5):
            checkpoints.record("a-0", synced=offset)
            with pytest.raises(OSError, match="No space"):
                checkpoints.save()
    assert [path.name for path in tmp_path.iterdir()] == [SYNCED_FILE]
    checkpoints.save()
    assert Checkpoints(Disk(), tmp_path).synced("a-0") == 4
