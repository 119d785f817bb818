"""Where logs start, and up to where they need not be checked: two files for all logs of a directory.

`recovery-point-offset-checkpoint` and `log-start-offset-checkpoint` are Kafka's: version, number of entries, and for
each log `topic partition offset`. They are replaced as a whole, durably. A start or a point that was saved never goes
back by itself, so a saved value may be older than the truth, never ahead of it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from anabranch.base.errors import AnabranchError
from anabranch.runtime.disk import Disk

RECOVERY_POINTS_FILE = "recovery-point-offset-checkpoint"
LOG_STARTS_FILE = "log-start-offset-checkpoint"
VERSION = "0"


class CheckpointError(AnabranchError):
    """A checkpoint file that was damaged after it was written."""


class Checkpoints:
    """The checkpoints in `directory`. May be used from several threads."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._paths = (directory / LOG_STARTS_FILE, directory / RECOVERY_POINTS_FILE)
        self._known = tuple(_load(disk, path) for path in self._paths)
        self._changes = [0, 0]
        self._saved = [0, 0]
        self._change = threading.Lock()
        self._save = threading.Lock()

    def log_start(self, name: str) -> int | None:
        """The first offset of the log `name`, where it was recorded."""
        return self._known[0].get(name)

    def recovery_point(self, name: str) -> int | None:
        """The offset below which the log `name` was synced, where it was recorded."""
        return self._known[1].get(name)

    def record(self, name: str, *, log_start: int | None = None, recovery_point: int | None = None) -> None:
        """Note offsets of a log; `save` makes them durable."""
        with self._change:
            for index, offset in enumerate((log_start, recovery_point)):
                if offset is not None and self._known[index].get(name) != offset:
                    self._known[index][name] = offset
                    self._changes[index] += 1

    def forget(self, name: str) -> None:
        """Forget a deleted log; `save` makes it durable."""
        with self._change:
            for index, known in enumerate(self._known):
                if known.pop(name, None) is not None:
                    self._changes[index] += 1

    def save(self) -> None:
        """Make everything that was noted durable. Blocks; OSError, and then it is still to do."""
        with self._save:
            for index, path in enumerate(self._paths):
                with self._change:
                    changes = self._changes[index]
                    data = _text(self._known[index]) if changes != self._saved[index] else None
                if data is not None:
                    self._disk.replace(path, data)
                    self._saved[index] = changes


def _text(offsets: Mapping[str, int]) -> bytes:
    lines = [VERSION, str(len(offsets))]
    for name, offset in sorted(offsets.items()):
        topic, _, partition = name.rpartition("-")
        lines.append(f"{topic} {partition} {offset}")
    return ("\n".join(lines) + "\n").encode()


def _load(disk: Disk, path: Path) -> dict[str, int]:
    if not disk.exists(path):
        return {}
    try:
        version, count, *lines = disk.read(path).decode().split("\n")
        if version != VERSION or len(lines) != int(count) + 1 or lines[-1]:
            raise ValueError(f"version {version} with {len(lines) - 1} entries, of which it says {count}")
        offsets = {}
        for line in lines[:-1]:
            topic, partition, offset = line.split(" ")
            offsets[f"{topic}-{int(partition)}"] = int(offset)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}). Remove it to have every log checked from its beginning."
        ) from error
    return offsets
