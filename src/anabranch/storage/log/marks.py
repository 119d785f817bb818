"""The cleaner's checkpoint of one log: up to where the log was clean, and since when, which is a tombstone's age.

A tombstone below a mark that is `delete.retention.ms` old has been clean for that long. A log whose checkpoint is
damaged or missing is cleaned again from its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.recovery import CLEANER_FILE


class Mark(NamedTuple):
    """Everything below `offset` was clean at `time_ms`."""

    offset: int
    time_ms: int


_known: WeakKeyDictionary[LocalLog, tuple[Mark, ...]] = WeakKeyDictionary()
"""The marks of open logs that were asked for: every round of the cleaner asks for those of all logs."""


def load_marks(log: LocalLog) -> Sequence[Mark]:
    """The marks of earlier runs, oldest first; none from a damaged checkpoint. OSError."""
    marks = _known.get(log)
    if marks is None:
        marks = _known[log] = _read(log)
    return marks


def _read(log: LocalLog) -> tuple[Mark, ...]:
    path = log.directory / CLEANER_FILE
    if not log.disk.exists(path):
        return ()
    try:
        _, _, *lines = log.disk.read(path).decode().splitlines()
        return tuple(Mark(*map(int, line.split(" "))) for line in lines)
    except (ValueError, TypeError):
        return ()


def clean_to(log: LocalLog) -> int:
    """Return the offset below which the log is clean."""
    return max((mark.offset for mark in load_marks(log)), default=0)


def note_clean(log: LocalLog, mark: Mark) -> None:
    """Add a mark, durably, and drop those that nothing needs any more. Blocks; OSError."""
    retention_start = mark.time_ms - log.config.delete_retention_ms
    marks = [*load_marks(log), mark]
    old = [mark for mark in marks if mark.time_ms <= retention_start]
    _store(log, [*old[-1:], *(mark for mark in marks if mark.time_ms > retention_start)])


def postpone_tombstones(log: LocalLog, now_ms: int) -> None:
    """Have all tombstones stay for `delete.retention.ms` from now on, durably. Blocks; OSError."""
    end = clean_to(log)
    if end:
        _store(log, [Mark(end, now_ms)])


def _store(log: LocalLog, marks: Sequence[Mark]) -> None:
    lines = ["0", str(len(marks)), *(f"{mark.offset} {mark.time_ms}" for mark in marks)]
    log.disk.replace(log.directory / CLEANER_FILE, ("\n".join(lines) + "\n").encode())
    _known[log] = tuple(marks)


def retained_before(log: LocalLog) -> int:
    """Where retention must stop in a compacted topic that was resized: a record goes after its older ones.

    Those may lie in other partitions; below the cleaner's mark they are gone.
    """
    return clean_to(log)
