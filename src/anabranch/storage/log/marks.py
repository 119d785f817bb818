"""The cleaner's checkpoint of one log: up to where the log was clean, and since when, which is a tombstone's age.

A tombstone below a mark that is `delete.retention.ms` old has been clean for that long. A log whose checkpoint is
damaged or missing is cleaned again from its start: a mark that is too high, or too old, would have records go, or stay,
that must not. The file has a version, the number of marks, one mark a line, and the CRC-32C of all that; version 0,
which has none, is read too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from anabranch.base.ids import is_whole
from anabranch.records.checksum import crc32c
from anabranch.storage.log.damage import keep_damaged
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.recovery import CLEANER_FILE

logger = logging.getLogger("anabranch.storage.log")

_CHECKSUM_SIZE = 9


class Mark(NamedTuple):
    """Everything below `offset` was clean at `time_ms`."""

    offset: int
    time_ms: int


class _Checkpoint(NamedTuple):
    """What the file of a log says."""

    marks: tuple[Mark, ...] = ()
    damaged: bool = False


_known: WeakKeyDictionary[LocalLog, _Checkpoint] = WeakKeyDictionary()
"""The checkpoints of open logs that were asked for: every round of the cleaner asks for those of all logs."""


def load_marks(log: LocalLog) -> Sequence[Mark]:
    """The marks of earlier runs, oldest first; none from a damaged checkpoint. OSError."""
    return _load(log).marks


def _load(log: LocalLog) -> _Checkpoint:
    found = _known.get(log)
    if found is None:
        found = _known[log] = _read(log)
    return found


def _read(log: LocalLog) -> _Checkpoint:
    path = log.directory / CLEANER_FILE
    if not log.disk.exists(path):
        return _Checkpoint()
    try:
        marks = _from_bytes(log.disk.read(path))
        if marks and marks[-1].offset > log.end:
            raise ValueError(f"the log is clean up to offset {marks[-1].offset}, but ends at {log.end}")
    except ValueError as error:
        logger.warning("%s is damaged: %s. The log is compacted again from its start", path, error)
        return _Checkpoint(damaged=True)
    return _Checkpoint(marks)


def _to_bytes(marks: Sequence[Mark]) -> bytes:
    lines = ["1", str(len(marks)), *(f"{mark.offset} {mark.time_ms}" for mark in marks)]
    data = ("\n".join(lines) + "\n").encode()
    return data + b"%08x\n" % crc32c(data)


def _from_bytes(data: bytes) -> tuple[Mark, ...]:
    """Read the form of `_to_bytes`, or version 0; ValueError for a damaged file."""
    if data.startswith(b"1\n"):
        data, crc = data[:-_CHECKSUM_SIZE], data[-_CHECKSUM_SIZE:]
        if crc != b"%08x\n" % crc32c(data):
            raise ValueError("the content does not fit its checksum")
    version, count, *lines = data.decode("ascii").split("\n")
    if version not in ("0", "1") or not lines or lines.pop() or str(len(lines)) != count:
        raise ValueError(f"expected version 0 or 1 and {count} marks, found {version} and {len(lines)}")
    marks = []
    for line in lines:
        offset, time_ms = line.split(" ")
        if not is_whole(offset) or not is_whole(time_ms):
            raise ValueError(f"{line!r} is no offset and time")
        marks.append(Mark(int(offset), int(time_ms)))
    if any(later.offset < mark.offset for mark, later in pairwise(marks)):
        raise ValueError("the marks are not in order")
    return tuple(marks)


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
    path = log.directory / CLEANER_FILE
    if _load(log).damaged:
        logger.warning("%s: damaged, kept as %s", path, keep_damaged(log.disk, path).name)
        _known[log] = _Checkpoint()
    log.disk.replace(path, _to_bytes(marks))
    _known[log] = _Checkpoint(tuple(marks))


def retained_before(log: LocalLog) -> int:
    """Where retention must stop in a compacted topic that was resized: a record goes after its older ones.

    Those may lie in other partitions; below the cleaner's mark they are gone.
    """
    return clean_to(log)
