"""Snapshots of producer state beside a log's segments, each named by the log's end that it was taken at.

A power loss takes the snapshots of unsynced records with the records: so besides the newest snapshot the newest one of
a synced end is kept, until a later one is synced. A snapshot is written whole before it has its name, so that one that
cannot be read was damaged later. What it told of records that are there is found in them; of deleted ones only another
snapshot tells.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from anabranch.base.errors import DecodeError
from anabranch.runtime.disk import Disk
from anabranch.storage.log.damage import keep_damaged
from anabranch.storage.log.errors import OfflineLogError

logger = logging.getLogger("anabranch.storage.log")

SUFFIX = ".snapshot"
T = TypeVar("T")


class Snapshots:
    """The snapshots in one log's directory. Every method but `writer` blocks; OSError. Writers may run in threads."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self._lock = threading.Lock()
        self._cuts = 0
        """Grows when the log may have been cut: a snapshot taken before may be of records that are gone."""
        self._known: tuple[int, ...] | None = None
        """The ends of those there are, once they were listed: the directory may have as many files as the log.

        Only the holder of the lock sets it: a list that was read before a change would last.
        """

    def write(self, data: bytes, end: int, *, flushed: int, only: bool) -> None:
        """Keep a snapshot taken at `end`; of the others keep none, or, unless `only`, the newest up to `flushed`."""
        with self._lock:
            self._write(data, end, flushed=flushed, only=only)

    def writer(self, make: Callable[[], bytes], end: int, *, flushed: int, replace: bool = False) -> Callable[[], bool]:
        """Return the work, for a thread, that keeps a snapshot unless one as new is there, or the log was cut.

        With `replace` one of the same end is replaced, and a newer one, which was taken later, will do.
        """
        cuts = self._cuts

        def write() -> bool:
            data = make()
            with self._lock:
                if self._cuts != cuts:
                    return False
                if any(other >= end + replace for other in self._offsets()):
                    return replace
                self._write(data, end, flushed=flushed, only=False)
                return True

        return write

    def _write(self, data: bytes, end: int, *, flushed: int, only: bool) -> None:
        others = [offset for offset in self._offsets() if offset != end]
        self._known = None
        self._disk.replace(self.path(end), data)
        self._known = (*others, end)
        kept = None if only else max((offset for offset in others if offset <= flushed), default=None)
        self._unlink([offset for offset in others if offset != kept])

    def forget_below(self, offset: int) -> None:
        """Remove the snapshots taken below `offset`, if one taken there or later is left."""
        with self._lock:
            offsets = self._offsets()
            self._unlink([other for other in offsets if other < offset <= max(offsets)])

    def cover(self, offset: int, *, flushed: int) -> bool:
        """Whether a snapshot covers every record below `offset`, also after a power loss."""
        return any(offset <= other <= flushed for other in self._offsets_now())

    def newest(self, log_start: int, end: int, restore: Callable[[bytes], T]) -> tuple[int, T] | None:
        """As `PartitionLog.newest_snapshot`, of a log with these ends."""
        found: tuple[int, T] | None = None
        damaged: dict[int, DecodeError] = {}
        for offset, data in self.newest_first(end):
            try:
                found = offset, restore(data)
                break
            except DecodeError as error:
                damaged[offset] = error
        for offset, reason in damaged.items():
            if log_start > 0 and (found is None or found[0] < log_start):
                raise OfflineLogError(
                    f"{self.path(offset)}: {reason}. No sound snapshot reaches the log's start {log_start}: what the "
                    "producers of deleted records sent is not known, and what they repeat could be appended twice. "
                    "Restore the file from a copy, or have `anabranch repair` rename it, which forgets them."
                )
            self._keep_damaged(offset, reason)
        return found

    def _keep_damaged(self, offset: int, error: DecodeError) -> None:
        with self._lock:
            left, self._known = [other for other in self._offsets() if other != offset], None
            kept = keep_damaged(self._disk, self.path(offset))
            self._known = tuple(left)
        logger.warning("%s: %s; kept as %s", self.path(offset), error, kept.name)

    def newest_first(self, end: int, *, passes_over: type[OSError] = FileNotFoundError) -> Iterator[tuple[int, bytes]]:
        """Read the snapshots taken at `end` or before, newest first, each with the offset it was taken at."""
        for offset in sorted(self._offsets_now(), reverse=True):
            if offset <= end:
                with contextlib.suppress(FileNotFoundError, passes_over):  # A writer may have replaced it.
                    yield offset, self._disk.read(self.path(offset))

    def forget_above(self, offset: int) -> None:
        """Remove the snapshots of records that were cut, before other records get their offsets."""
        with self._lock:
            self._cuts += 1
            gone = [other for other in self._offsets() if other > offset]
            self._unlink(gone)
        if gone:
            self._disk.sync_directory(self._directory)

    def path(self, offset: int) -> Path:
        """Where the snapshot taken at `offset` is."""
        return self._directory / f"{offset:020d}{SUFFIX}"

    def _unlink(self, offsets: Sequence[int]) -> None:
        left, self._known = [other for other in self._offsets() if other not in offsets], None
        for offset in offsets:
            self._disk.unlink(self.path(offset))
        self._known = tuple(left)

    def _offsets_now(self) -> Sequence[int]:
        """The ends of those there are, or were, while a writer is at them: this does not wait for it."""
        known = self._known
        if known is not None:
            return known
        if not self._lock.acquire(blocking=False):
            return self._list()
        try:
            return self._offsets()
        finally:
            self._lock.release()

    def _offsets(self) -> Sequence[int]:
        """The ends of those there are; for the holder of the lock."""
        if self._known is None:
            self._known = self._list()
        return self._known

    def _list(self) -> tuple[int, ...]:
        try:
            names = self._disk.names(self._directory)
        except FileNotFoundError:  # Nothing was ever written.
            return ()
        return tuple(int(name[: -len(SUFFIX)]) for name in names if name.endswith(SUFFIX))
