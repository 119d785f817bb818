"""The checkpoint files."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.runtime.disk import Disk
from anabranch.storage.checkpoints import LOG_STARTS_FILE, RECOVERY_POINTS_FILE, CheckpointError, Checkpoints


def test_what_was_saved_is_read_again_in_kafkas_format(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.record("flights-1", log_start=5, recovery_point=70)
    checkpoints.record("with-dash-0", recovery_point=3)
    checkpoints.save()
    assert (tmp_path / RECOVERY_POINTS_FILE).read_text() == "0\n2\nflights 1 70\nwith-dash 0 3\n"
    assert (tmp_path / LOG_STARTS_FILE).read_text() == "0\n1\nflights 1 5\n"
    again = Checkpoints(Disk(), tmp_path)
    assert (again.log_start("flights-1"), again.recovery_point("flights-1")) == (5, 70)
    assert (again.log_start("with-dash-0"), again.recovery_point("with-dash-0")) == (None, 3)
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


def test_what_could_not_be_saved_is_still_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(Disk(), tmp_path)
    checkpoints.record("a-0", recovery_point=1)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", _refuse)
        with pytest.raises(OSError, match="No space"):
            checkpoints.save()
    checkpoints.save()
    assert Checkpoints(Disk(), tmp_path).recovery_point("a-0") == 1


@pytest.mark.parametrize("text", ["", "0\n", "0\n2\na 0 1\n", "1\n0\n", "0\n1\na 0\n", "0\n1\na 0 x\n", "\xff"])
def test_a_damaged_file_is_told_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / RECOVERY_POINTS_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="Remove it"):
        Checkpoints(Disk(), tmp_path)


def _refuse(fd: int) -> None:
    raise OSError(28, "No space left on device")
