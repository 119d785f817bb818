"""Opening a log: below the recovery point it is trusted, above it every batch is checked and the tail may be cut.

In this order: finish or undo an interrupted cleaning; take in the segments, oldest first; from the recovery point on
check header, length, CRC and offsets of every batch, cut at the first that is not sound, drop what comes after it.
Below the recovery point only what is cheap is checked (sizes, the index, the headers behind its last entry, that each
segment ends where the next begins), and nothing is cut: a log that is broken there is offline.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.records.batch import HEADER_SIZE, BatchHeader, check, parse_header
from anabranch.runtime.disk import Disk, File
from anabranch.storage.log.epochs import LeaderEpochs
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.index import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from anabranch.storage.log.segment import DELETED_SUFFIX, LOG_SUFFIX, Segment, path_of

logger = logging.getLogger("anabranch.storage.log")

SCAN_SIZE = 4 << 20
CLEANED_SUFFIX = ".cleaned"
"""A compacted segment that is not finished, or not synced."""
SWAP_SUFFIX = ".swap"
"""A finished compacted segment that replaces the segments whose offsets it covers."""


def epochs_of_batches(disk: Disk, directory: Path) -> LeaderEpochs:
    """Read the leader epochs from the batches of a log, as far as these can be read: its file of epochs is lost."""
    epochs = LeaderEpochs()
    with contextlib.suppress(DecodeError):
        for name in disk.names(directory):
            if name.endswith(LOG_SUFFIX):
                segment = Segment(disk, directory, int(name[: -len(LOG_SUFFIX)]), 0)
                segment.load()
                for _, header in segment.walk():
                    epochs.start(header.leader_epoch, header.base_offset)
    return epochs


class Recovered(NamedTuple):
    """The files of a log's directory."""

    segments: list[Segment]
    log_start: int
    end: int


class Tail(NamedTuple):
    """Where the sound part of a file ends, and why it ends there."""

    size: int
    reason: str | None
    """None when the whole file is sound."""


def recover(
    disk: Disk,
    directory: Path,
    *,
    log_start: int | None,
    recovery_point: int | None,
    start_offset: int,
    epochs: LeaderEpochs,
    index_interval: int,
    visit: Callable[[BatchHeader], None],
) -> Recovered:
    """Open the segments in `directory`; `epochs` learns what the checked batches tell. All that is left is synced.

    `log_start` and `recovery_point` are those of the checkpoint, None where it has none. Raises OfflineLogError.
    """
    bases = _tidy(disk, directory)
    start = bases[0] if bases and log_start is None else start_offset if log_start is None else log_start
    point = start if recovery_point is None else recovery_point
    scanner = _Opening(disk, directory, point, epochs, index_interval, visit)
    scanner.gaps = recovery_point is None or point <= start
    bases = scanner.drop_below(bases, start)
    scanner.end = bases[0] if bases else start
    if point <= start:
        # All synced records are deleted. A power loss may have brought files of them back, in any state.
        scanner.point = scanner.end
    for index, base in enumerate(bases):
        following = bases[index + 1] if index + 1 < len(bases) else None
        if not scanner.take(base, following):
            scanner.drop(bases[index + 1 :])
            break
    segments, end = scanner.segments, scanner.end
    if end < start and point <= start:
        scanner.drop([segment.base_offset for segment in segments])
        segments, end = [], start
    if end < point:
        raise OfflineLogError(
            f"{directory}: the log ends at offset {end}, but was synced up to {point}. "
            "Files are missing or were cut; restore them, or delete the topic."
        )
    scanner.sync()
    return Recovered(segments, max(start, segments[0].base_offset) if segments else start, end)


class _Opening:
    """One log while it is opened."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        point: int,
        epochs: LeaderEpochs,
        index_interval: int,
        visit: Callable[[BatchHeader], None],
    ) -> None:
        self.segments: list[Segment] = []
        self.end = 0
        self.gaps = False
        """Whether the checked segment may be compacted, so that offsets are missing in it."""
        self._disk = disk
        self._directory = directory
        self.point = point
        self._epochs = epochs
        self._index_interval = index_interval
        self._visit = visit
        self._names_changed = False

    def drop_below(self, bases: list[int], start: int) -> list[int]:
        """Remove the segments that end at or before the log start; answer the others."""
        gone = [base for base, following in itertools.pairwise(bases) if following <= start]
        self._remove(gone)
        return bases[len(gone) :]

    def drop(self, bases: list[int]) -> None:
        """Remove segments behind a cut."""
        for base in bases:
            logger.warning("%s: removed, because the log ends before it", path_of(self._directory, base))
        self._remove(bases)

    def sync(self) -> None:
        """Make names durable where they changed."""
        if self._names_changed:
            self._disk.sync_directory(self._directory)
            self._disk.sync_directory(self._directory.parent)

    def take(self, base: int, following: int | None) -> bool:
        """Take a segment in; False if records are missing at its end, so that later segments are void."""
        segment = Segment(self._disk, self._directory, base, self._index_interval)
        segment.load()
        try:
            if following is not None and following <= self.point:
                self._take_old(segment, following)
                return True
            if base > self.end and base > self.point:
                logger.warning("%s: removed, because the log ends at offset %d before it", segment.path, self.end)
                self._remove([base])
                return False
            checked = segment.load_index(self.point)
        except DecodeError as error:
            raise OfflineLogError(
                f"{segment.path}: {error}, below the recovery point {self.point}. Nothing was cut; "
                "restore the file, or delete the topic."
            ) from error
        return self._take_checked(segment, checked, following)

    def _take_old(self, segment: Segment, following: int) -> None:
        """Take in a segment that lies below the recovery point and was sealed there."""
        segment.sealed = True
        size = segment.load_index(following)
        if segment.end != following:
            raise DecodeError(f"the file ends at offset {segment.end}, the next one begins at {following}")
        if size < segment.size:
            # An append that failed half-way, whose traces a power loss brought back. No offset of theirs was given.
            logger.warning("%s: cut at position %d of %d, where its offsets end", segment.path, size, segment.size)
            segment.truncate(size, following)
            segment.sealed = True
        if segment.index.unsynced:
            for file in segment.index.store():
                file.sync()
            segment.index.unsynced = False
        segment.release()
        self.segments.append(segment)
        self.end = following

    def _take_checked(self, segment: Segment, checked: int, following: int | None) -> bool:
        """Check the segment from position `checked` on, cut it if it must be; False as `take`."""

        def found(position: int, header: BatchHeader) -> None:
            segment.note_header(position, header)
            self._epochs.start(header.leader_epoch, header.base_offset)
            self._visit(header)

        tail = scan(segment.file, checked, segment.size, segment.end, found, gaps=self.gaps)
        self.segments.append(segment)
        if tail.reason is not None:
            logger.warning(
                "%s: cut at position %d of %d: %s. Offsets go on at %d",
                *(segment.path, tail.size, segment.size, tail.reason, segment.end),
            )
            segment.truncate(tail.size, segment.end)
        if tail.reason is not None or tail.size > checked:
            segment.file.sync()
            self._names_changed = True
        self.end = segment.end
        if following is None:
            return True
        segment.seal()
        return following == self.end

    def _remove(self, bases: list[int]) -> None:
        for base in bases:
            self._disk.discard(Segment(self._disk, self._directory, base, self._index_interval).remove())
            self._names_changed = True


def scan(
    file: File,
    position: int,
    size: int,
    next_offset: int,
    visit: Callable[[int, BatchHeader], None],
    *,
    gaps: bool = False,
) -> Tail:
    """Check the batches from `position` to `size`: header, length, CRC, and that offsets go on from `next_offset`."""
    start, window = position, b""
    while position < size:
        if size - position < HEADER_SIZE:
            return Tail(position, f"{size - position} bytes are left, which is no batch header")
        if position + HEADER_SIZE > start + len(window):
            start, window = position, file.read(min(SCAN_SIZE, size - position), position)
        try:
            header = parse_header(window, position - start, size - position)
        except DecodeError as error:
            return Tail(position, str(error))
        if header.base_offset < next_offset or (header.base_offset > next_offset and not gaps):
            return Tail(position, f"the batch begins at offset {header.base_offset}, expected {next_offset}")
        if position + header.size > start + len(window):
            start, window = position, file.read(max(SCAN_SIZE, header.size), position)
        try:
            check(window, position - start, header)
        except DecodeError as error:
            return Tail(position, str(error))
        visit(position, header)
        next_offset = header.next_offset
        position += header.size
    return Tail(position, None)


def _tidy(disk: Disk, directory: Path) -> list[int]:
    """Finish the interrupted operations; return the base offsets of the segments."""
    names = disk.names(directory)
    doomed = [directory / name for name in names if name.endswith((DELETED_SUFFIX, CLEANED_SUFFIX, ".tmp"))]
    bases = {int(name[: -len(LOG_SUFFIX)]) for name in names if name.endswith(LOG_SUFFIX)}
    for name in names:
        if name.endswith(LOG_SUFFIX + SWAP_SUFFIX):
            _finish_swap(disk, directory, name, bases)
    for name in names:
        stem, _, suffix = name.rpartition(".")
        if f".{suffix}" in (INDEX_SUFFIX, TIME_INDEX_SUFFIX) and int(stem) not in bases:
            doomed.append(directory / name)
    if doomed:
        disk.discard(doomed)
    return sorted(bases)


def _finish_swap(disk: Disk, directory: Path, name: str, bases: set[int]) -> None:
    """Put a compacted segment in the place of those that it was made of."""
    base = int(name[: -len(LOG_SUFFIX + SWAP_SUFFIX)])
    swap = disk.open(directory / name)
    position, size, end = 0, swap.size(), base
    try:
        while position < size:
            header = parse_header(swap.read(HEADER_SIZE, position), 0, size - position)
            position, end = position + header.size, header.next_offset
    except DecodeError as error:
        raise OfflineLogError(f"{swap.path}: {error}. Restore the file, or delete the topic.") from error
    replaced = [other for other in bases if base <= other < end]
    replace_by_swap(disk, directory, base, replaced)
    bases.difference_update(replaced)
    bases.add(base)


def replace_by_swap(disk: Disk, directory: Path, base: int, replaced: list[int]) -> None:
    """Remove the segments `replaced` and give the compacted segment its name; may be interrupted and done again."""
    for other in sorted(replaced, reverse=True):
        disk.discard(Segment(disk, directory, other, 0).remove())
    disk.sync_directory(directory)
    path = path_of(directory, base)
    disk.rename(path.with_name(path.name + SWAP_SUFFIX), path)
    disk.sync_directory(directory)
