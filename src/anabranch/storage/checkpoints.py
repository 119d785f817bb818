"""Where logs start, up to where they were synced, and up to where they need not be checked: for all of a directory.

`log-start-offset-checkpoint` and `recovery-point-offset-checkpoint` are Kafka's, `synced-offset-checkpoint` follows the
syncs: version, number of entries, and for each log `topic partition offset`. Version 1, which is written, adds the
CRC-32C of these three to each line; version 0 is read too. The files are replaced as a whole, durably. Nothing saved
goes back by itself, so a saved value may be older than the truth, never ahead of it.

A damaged line concerns its log only. A lost recovery point has a log checked from its start; a log whose start is lost
is offline, for its records below the true start are deleted. A damaged file is copied before it is written again: at
each moment there is one, with all that is sound of it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import is_whole
from anabranch.records.checksum import crc32c
from anabranch.runtime.disk import Disk
from anabranch.storage.log.damage import DAMAGED_SUFFIX, aside, keep_bytes

logger = logging.getLogger("anabranch.storage.checkpoints")

LOG_STARTS_FILE = "log-start-offset-checkpoint"
RECOVERY_POINTS_FILE = "recovery-point-offset-checkpoint"
SYNCED_FILE = "synced-offset-checkpoint"
_FILES = (LOG_STARTS_FILE, RECOVERY_POINTS_FILE, SYNCED_FILE)
_STARTS, _POINTS, _SYNCED = range(3)
_UPPER = _POINTS, _SYNCED
WITHOUT_CHECKSUMS, VERSION = "0", "1"
_LINES_AT_ONCE = 1_000


class Known(NamedTuple):
    """What the checkpoints tell of a log, None where they have no entry."""

    log_start: int | None
    recovery_point: int | None
    synced: int | None
    """Records below were synced: they are there, or the log is damaged."""


NOTHING_KNOWN = Known(None, None, None)


class _Text(NamedTuple):
    """What a file is to say, and the count of the changes that are in it."""

    changes: int
    lines: list[str]


class CheckpointError(AnabranchError):
    """The entry of a log in a checkpoint file is lost or damaged."""


class Checkpoints:
    """The checkpoints in `directory`. May be used from several threads."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        """Read the files. OSError; damage is logged, and `log_start` raises where it matters."""
        self._disk = disk
        self._paths = tuple(directory / name for name in _FILES)
        self._known: list[dict[str, int]] = []
        self._lines: list[dict[str, str]] = []
        self._stale: tuple[dict[str, None], ...] = tuple({} for _ in _FILES)
        """The logs whose line is not that of their offset."""
        self._damage: list[str | None] = []
        for path in self._paths:
            offsets, damage = _load(disk, path)
            if damage is not None:
                logger.error("%s is damaged: %s", path, damage)
            self._known.append(offsets)
            self._lines.append({})
            self._damage.append(damage)
        for stale, offsets in zip(self._stale, self._known, strict=True):
            stale.update(dict.fromkeys(offsets))
        self._held: dict[str, int] = {}
        """The log starts that are in the file, of logs whose start has moved since, or that are gone."""
        self._added = False
        """Whether the file of log starts lacks a log."""
        self._taken: Collection[str] = ()
        """The logs whose starts are being written."""
        self._adding = False
        """Whether those of new logs are."""
        self._changes = [0] * len(_FILES)
        self._saved = [0] * len(_FILES)
        self._lowered: dict[tuple[int, str], int] = {}
        """The offsets that files may have higher than they are, and the changes since which they are lower."""
        self._kept = [False] * len(_FILES)
        """Whether a damaged file is kept already, beside the one that is written."""
        self._change = threading.Lock()
        self._save = threading.Lock()

    def known(self, name: str) -> Known:
        """All that was recorded of the log `name`. CheckpointError if its log start is lost."""
        return Known(self.log_start(name), self.recovery_point(name), self.synced(name))

    def log_start(self, name: str) -> int | None:
        """The first offset of the log `name`, where it was recorded. CheckpointError if that is lost."""
        found = self._known[_STARTS].get(name)
        if found is not None:
            return found
        path, damage = self._paths[_STARTS], self._damage[_STARTS]
        if damage is None and (name in self._known[_POINTS] or name in self._known[_SYNCED]):
            damage = f"{self._paths[_POINTS].name} has the log, this file does not"
        if damage is None:
            return None
        raise CheckpointError(
            f"{path} is damaged ({damage}), so where {name} starts is not known. Restore the file from a copy, "
            "or have `anabranch repair` start the log at its first file."
        )

    def recovery_point(self, name: str) -> int | None:
        """The offset below which the log `name` need not be checked, where it was recorded."""
        return self._known[_POINTS].get(name)

    def synced(self, name: str) -> int | None:
        """The offset below which the log `name` was synced, as far as that was recorded."""
        return self._known[_SYNCED].get(name)

    def has_saved(self, name: str, log_start: int) -> bool:
        """Whether it is durable that the log `name` starts at `log_start`; False where that is not certain."""
        with self._change:
            unsure = self._added or self._adding or name in self._held or name in self._taken
            return not unsure and self._known[_STARTS].get(name) == log_start

    def names(self) -> set[str]:
        """The logs with an entry."""
        return {name for known in self._known for name in known}

    def record(
        self,
        name: str,
        *,
        log_start: int | None = None,
        recovery_point: int | None = None,
        synced: int | None = None,
    ) -> None:
        """Note offsets of a log; `save` makes them durable."""
        with self._change:
            for index, offset in enumerate((log_start, recovery_point, synced)):
                if offset is not None and self._known[index].get(name) != offset:
                    if index == _STARTS:
                        self._hold(name)
                    self._changes[index] += 1
                    if self._known[index].get(name, offset) > offset:
                        self._lowered[index, name] = self._changes[index]
                    self._known[index][name] = offset
                    self._stale[index][name] = None

    def go_above(self, name: str, offset: int) -> bool:
        """Whether the log `name` is noted, or was and may be in the files, as synced above an offset."""
        with self._change:
            return any((self._known[at].get(name) or 0) > offset or (at, name) in self._lowered for at in _UPPER)

    def forget(self, name: str) -> None:
        """Forget a deleted log; `save` makes it durable."""
        with self._change:
            self._hold(name)
            for index, known in enumerate(self._known):
                if known.pop(name, None) is not None:
                    self._lines[index].pop(name, None)
                    self._stale[index].pop(name, None)
                    self._changes[index] += 1

    def _hold(self, name: str) -> None:
        """Note what the file says of a log start that is about to change."""
        before = self._known[_STARTS].get(name)
        if before is not None:
            self._held.setdefault(name, before)
        elif name not in self._held:
            self._added = True

    def save(self) -> None:
        """Make everything that was noted durable. Blocks; OSError, and then it is still to do.

        All files are of one moment: what is noted while they are replaced waits for the next time.
        """
        with self._save:
            self._write_lines()
            with self._change:
                due = {
                    index: _Text(self._changes[index], self._current_lines(index))
                    for index in (_STARTS, _POINTS, _SYNCED)
                    if self._changes[index] != self._saved[index]
                }
                held, added = (self._held if due.keys() - {_STARTS} else {}), self._added
                taken, self._held, self._added = self._held, {}, False
                self._taken, self._adding = taken, added
                kept = {name: _line(name, offset) for name, offset in held.items()} if added else {}
                before = [*{**self._lines[_STARTS], **kept}.values()] if kept else []
            try:
                if before:
                    self._replace(_STARTS, before)
                for index in (_POINTS, _SYNCED, _STARTS) if held else (_STARTS, _POINTS, _SYNCED):
                    if index in due:
                        self._replace(index, due[index].lines)
                        self._saved[index] = due[index].changes
                        self._forget_lowered(index)
            except OSError:
                with self._change:
                    self._held = {**self._held, **taken}
                    self._added |= added
                raise
            else:
                with self._change:
                    self._taken, self._adding = (), False

    def _replace(self, index: int, lines: list[str]) -> None:
        path = self._paths[index]
        if self._damage[index] is not None and not self._kept[index] and self._disk.exists(path):
            away, file = aside(self._disk, path, DAMAGED_SUFFIX), self._disk.open(path)
            if file.size():
                keep_bytes(self._disk, file, 0, file.size(), away)
                logger.error("%s is kept as %s", path, away.name)
        self._kept[index] = True
        self._disk.replace(path, _text(lines))

    def _forget_lowered(self, index: int) -> None:
        with self._change:
            for (at, name), changes in list(self._lowered.items()):
                if at == index and changes <= self._saved[index]:
                    del self._lowered[at, name]

    def _write_lines(self) -> None:
        """Write most of the lines that are to be written anew; nobody else waits for long."""
        for index, stale in enumerate(self._stale):
            while len(stale) > _LINES_AT_ONCE:
                with self._change:
                    self._current_lines(index, _LINES_AT_ONCE)

    def _current_lines(self, index: int, some: int | None = None) -> list[str]:
        """The lines of a file; those are made that have changed, or `some` of them, and then none are returned."""
        known, lines, stale = self._known[index], self._lines[index], self._stale[index]
        for name in list(itertools.islice(stale, some)):
            lines[name] = _line(name, known[name])
            del stale[name]
        return list(lines.values()) if some is None else []


def _line(name: str, offset: int) -> str:
    topic, _, partition = name.rpartition("-")
    line = f"{topic} {partition} {offset}"
    return f"{line} {crc32c(line.encode()):08x}"


def _text(lines: list[str]) -> bytes:
    return ("\n".join([VERSION, str(len(lines)), *lines]) + "\n").encode()


def _load(disk: Disk, path: Path) -> tuple[dict[str, int], str | None]:
    """Read the sound entries of a file, and what is wrong with the others."""
    if not disk.exists(path):
        return {}, None
    version, *rest = disk.read(path).decode("latin-1").split("\n")
    count, lines = (rest[0], rest[1:]) if rest else ("", [])
    damage = None
    if version not in (WITHOUT_CHECKSUMS, VERSION):
        damage = f"it begins with {version[:20]!r}, not with a version"
    elif not is_whole(count) or len(lines) != int(count) + 1 or lines[-1]:
        damage = f"it has {max(len(lines) - 1, 0)} whole entries and says {count[:20]!r}"
    offsets: dict[str, int] = {}
    for line in lines:
        # A line that has a checksum tells by itself whether it is sound, whatever the lines before it say.
        entry = _entry(line, version == WITHOUT_CHECKSUMS and damage is None)
        if entry is not None:
            offsets[entry[0]] = entry[1]
        elif line:
            damage = damage or f"the entry {line[:60]!r} does not fit its checksum"
    return offsets, damage


def _entry(line: str, without_checksum: bool) -> tuple[str, int] | None:
    words = line.split(" ")
    try:
        if len(words) == 3 and without_checksum:
            topic, partition, offset = words
        else:
            topic, partition, offset, crc = words
            if f"{crc32c(' '.join(words[:3]).encode('latin-1')):08x}" != crc:
                return None
        return f"{topic}-{int(partition)}", int(offset)
    except ValueError:
        return None
