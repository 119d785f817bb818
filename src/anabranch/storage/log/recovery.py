"""Opening a log: below the recovery point it is trusted, above it every batch is checked and a torn tail is cut.

In this order: finish or undo an interrupted cleaning; take in the segments, oldest first; from the recovery point on
check header, length, CRC and offsets of every batch. At the first that is not sound the log either ends, torn, or is
damaged (`storage.log.damage`). The bytes of a torn tail are kept beside the log. A damaged log, or one whose files and
checkpoints contradict each other, is offline, and stays as it was found: files are removed only after all checks.
Below the recovery point only what is cheap is checked (sizes, the index, the headers behind its last entry, that each
segment ends where the next begins).

What lies above the end that was known to be synced is written again, then synced: the process may have been killed
between a sync that failed and its hearing of that. After a power loss what is read is on the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.ids import is_whole
from anabranch.records.batch import HEADER_SIZE, OFFSET_MAX, BatchHeader, check, parse_header
from anabranch.runtime.disk import DISCARDED_SUFFIX, Disk, File
from anabranch.storage.checkpoints import Known
from anabranch.storage.log.damage import (
    ASIDE_SUFFIX,
    DAMAGED_SUFFIX,
    TooManyError,
    aside,
    is_whole_batch,
    keep_bytes,
    sound_batch_behind,
)
from anabranch.storage.log.epochs import LeaderEpochs
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.index import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from anabranch.storage.log.segment import LOG_SUFFIX, Segment, path_of

logger = logging.getLogger("anabranch.storage.log")

SCAN_SIZE = 4 << 20
CLEANER_FILE = "cleaner-checkpoint"
"""A log that has it may be compacted: `may_be_compacted`."""
FINDING_FILE = "scrub-finding"
"""A batch of the log was found unsound (`scrub`)."""
CLEANED_SUFFIX = ".cleaned"
"""A compacted segment that is not finished, or not synced."""
SWAP_SUFFIX = ".swap"
"""A finished compacted segment that replaces the segments whose offsets it covers."""


def may_be_compacted(disk: Disk, directory: Path) -> bool:
    """Whether offsets may be missing in the log; also while a damaged checkpoint of the cleaner is being replaced."""
    path = directory / CLEANER_FILE
    return disk.exists(path) or disk.exists(path.with_name(path.name + DAMAGED_SUFFIX))


def epochs_of_batches(disk: Disk, directory: Path) -> LeaderEpochs:
    """Read the leader epochs from the batches of a log, as far as these can be read: its file of epochs is lost."""
    epochs = LeaderEpochs()
    with contextlib.suppress(DecodeError):
        for name in disk.names(directory):
            base = base_of(name)
            if base is not None:
                segment = Segment(disk, directory, base, 0)
                segment.load()
                for _, header in segment.walk():
                    epochs.start(header.leader_epoch, header.base_offset)
    return epochs


class Recovered(NamedTuple):
    """The files of a log's directory."""

    segments: list[Segment]
    log_start: int
    end: int
    compacted: bool
    """Whether the log was compacted before, as far as its checkpoint tells."""
    as_appended_from: int
    """Where it was, all before may be compacted: all but the newest, or all, as a power loss may take the newest."""


class Tail(NamedTuple):
    """Where the sound part of a file ends, and why it ends there."""

    size: int
    reason: str | None
    """None when the whole file is sound."""


def recover(
    disk: Disk,
    directory: Path,
    *,
    known: Known,
    start_offset: int,
    epochs: LeaderEpochs,
    index_interval: int,
    visit: Callable[[BatchHeader], None],
    power_lost: bool = False,
) -> Recovered:
    """Open the segments in `directory`; `epochs` learns what the checked batches tell. All that is left is synced.

    `power_lost`: unsynced bytes may be missing in any order, not only at the end. Raises OfflineLogError.
    """
    bases = _tidy(disk, directory, known.log_start or 0)
    first = bases[0] if bases else start_offset
    start = first if known.log_start is None else known.log_start
    point = start if known.recovery_point is None else known.recovery_point
    floor = max(point, known.synced or 0)
    _check_start(directory, start, floor, known, bases, power_lost=power_lost)
    opening = _Opening(disk, directory, point, epochs, index_interval, visit)
    opening.floor, opening.power_lost, opening.is_recorded = floor, power_lost, known.recovery_point is not None
    compacted = may_be_compacted(disk, directory)
    if compacted and known.recovery_point is None:
        opening.gaps_to = OFFSET_MAX
    elif compacted and floor <= start:
        opening.gaps_to = start
    below = [base for base, following in itertools.pairwise(bases) if following <= start]
    bases = bases[len(below) :]
    opening.end = bases[0] if bases else start
    if floor <= start:
        # All synced records are deleted. A power loss may have brought files of them back, in any state.
        opening.point = opening.floor = opening.end
        opening.is_recorded = False
    for index, base in enumerate(bases):
        later = bases[index + 1 :]
        if not opening.take(base, later):
            opening.set_aside(later)
            break
    segments, end = opening.segments, opening.end
    if end < start and floor <= start and (power_lost or not any(segment.size for segment in segments)):
        opening.set_aside([segment.base_offset for segment in segments])
        segments, end = [], start
    if end < max(floor, start):
        raise OfflineLogError(
            f"{directory}: the log ends at offset {end}, but was synced up to {max(floor, start)}. "
            "Files are missing or were cut; restore them, or delete the topic."
        )
    opening.remove(below)
    _remove_strays(disk, directory)
    opening.sync()
    for segment in segments:
        segment.release()
    log_start, as_appended_from = start, 0
    if segments:
        log_start = max(start, segments[0].base_offset)
        as_appended_from = end if power_lost else segments[-1].base_offset
    return Recovered(segments, log_start, end, compacted, as_appended_from)


def _check_start(directory: Path, start: int, floor: int, known: Known, bases: list[int], *, power_lost: bool) -> None:
    """Refuse a log start that contradicts the synced end or the files."""
    if known.synced is not None and start > floor:
        raise OfflineLogError(
            f"{directory}: the checkpoint says that the log starts at offset {start}, but it was synced up to {floor} "
            "only. Restore log-start-offset-checkpoint, or have `anabranch repair` start the log at its first file."
        )
    if bases and bases[0] > start and not (power_lost and floor <= start):
        raise OfflineLogError(
            f"{directory}: the log starts at offset {start}, but its first file begins at {bases[0]}. "
            "Restore the missing file, or have `anabranch repair` start the log at its first file."
        )


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
        self.gaps_to = 0
        """The offset below which the checked batches may be compacted, so that offsets are missing."""
        self._disk = disk
        self._directory = directory
        self.point = point
        self.is_recorded = False
        """Whether that was noted, as the end of a batch: without, it is the log start, which may lie within one."""
        self.floor = point
        """The offset below which nothing may be missing."""
        self.power_lost = False
        self._epochs = epochs
        self._index_interval = index_interval
        self._visit = visit
        self._names_changed = False

    def set_aside(self, bases: list[int]) -> None:
        """Rename segments behind the log's end, in which no sound batch is, or unsynced ones after a power loss."""
        for base in bases:
            path = path_of(self._directory, base)
            away = aside(self._disk, path, ASIDE_SUFFIX)
            self._disk.rename(path, away)
            self._names_changed = True
            logger.warning("%s: the log ends before it; kept as %s", path, away.name)

    def remove(self, bases: list[int]) -> None:
        """Remove the segments that end at or before the log start."""
        for base in bases:
            self._disk.discard(Segment(self._disk, self._directory, base, self._index_interval).remove())
            self._names_changed = True

    def sync(self) -> None:
        """Make names durable where they changed."""
        if self._names_changed:
            self._disk.sync_directory(self._directory)
            self._disk.sync_directory(self._directory.parent)

    def take(self, base: int, later: list[int]) -> bool:
        """Take a segment in; False if the log ends in it, or before it, so that the `later` segments are void."""
        following = later[0] if later else None
        segment = Segment(self._disk, self._directory, base, self._index_interval)
        segment.load()
        try:
            if following is not None and following <= self.point:
                self._take_old(segment, following)
                return True
            if base > self.end and base > self.point:
                self._end_or_refuse(segment, 0, f"offsets {self.end} to {base - 1} are missing before it", later)
                self.set_aside([base])
                return False
            checked = segment.load_index(self.point)
            if self.is_recorded and base < self.point:
                self._check_point(segment, checked)
        except DecodeError as error:
            raise OfflineLogError(
                f"{segment.path}: {error}, below the recovery point {self.point}. Nothing was cut; "
                "restore the file, or delete the topic."
            ) from error
        return self._take_checked(segment, checked, later)

    def _take_old(self, segment: Segment, following: int) -> None:
        """Take in a segment that lies below the recovery point and was sealed there."""
        segment.sealed = True
        size = segment.load_index(following)
        if segment.end != following:
            raise DecodeError(f"the file ends at offset {segment.end}, the next one begins at {following}")
        if size < segment.size:
            # An append that failed half-way, whose traces a power loss brought back. No offset of theirs was given.
            if self._is_earlier(segment, size, following):
                raise DecodeError(f"a batch of an earlier offset lies behind the end of those below {following}")
            self._cut(segment, size, following, "its offsets end there")
            segment.sealed = True
        self._store_index(segment)
        segment.release()
        self.segments.append(segment)
        self.end = following

    def _take_checked(self, segment: Segment, checked: int, later: list[int]) -> bool:
        """Check the segment from position `checked` on, cut it if it must be; False as `take`."""

        doubtful = None

        def found(position: int, header: BatchHeader) -> None:
            nonlocal doubtful
            if doubtful is None and header.next_offset > self.floor:
                doubtful = position
            segment.note_header(position, header)
            self._epochs.start(header.leader_epoch, header.base_offset)
            self._visit(header)

        tail = scan(segment.file, checked, segment.size, segment.end, found, gaps_to=self.gaps_to)
        self.end = segment.end
        reason = tail.reason
        is_earlier = reason is not None and self._is_earlier(segment, tail.size, self.end)
        if is_earlier and not (self.power_lost and self.end >= self.floor):
            raise OfflineLogError(
                f"{segment.path}, position {tail.size}: {reason}. A sound batch lies there: its offset has changed, or "
                "that of the batch before. Nothing was cut; restore the file from a copy, or delete the topic."
            )
        if later and later[0] == self.end and not is_earlier:
            reason = None  # Bytes behind are of an append that failed: no offset of theirs was given.
        elif later and reason is None:
            reason = f"it ends at offset {self.end}, the next file begins at {later[0]}"
        if reason is not None:
            self._end_or_refuse(segment, tail.size, reason, later)
        self.segments.append(segment)
        if tail.reason is not None:
            self._cut(segment, tail.size, segment.end, tail.reason)
        if doubtful is not None and not self.power_lost:
            write_again(segment.file, doubtful, tail.size)
        if tail.reason is not None or tail.size > checked:
            segment.file.sync()
            self._names_changed = True
        elif not segment.size:  # Made by an append that failed, it may be in no synced directory.
            segment.durable_name = False
        if reason is not None:
            return False
        if later:
            segment.seal()
            self._store_index(segment)
        return True

    def _store_index(self, segment: Segment) -> None:
        """Make the index of a finished segment durable: else the next recovery point would be noted before it.

        Where the disk refuses, that makes the log slower, and is tried again with later syncs. OSError only where no
        recovery point is known, so that offsets may be missing: behind one they may not.
        """
        if not segment.index.unsynced:
            return
        try:
            for file in segment.index.store():
                file.sync()
            segment.index.unsynced = False
        except OSError:
            if self.gaps_to == OFFSET_MAX:
                raise

    def _check_point(self, segment: Segment, position: int) -> None:
        """Refuse a segment where no batch ends at the recovery point, or one of before lies behind, at this position.

        No checksum covers the offset at which a batch begins. DecodeError.
        """
        if segment.end > self.point:
            raise DecodeError(f"a batch ends at offset {segment.end}, and one was synced that ends between")
        if self._is_earlier(segment, position, self.point):
            raise DecodeError(f"a batch of an earlier offset lies behind the end of those below {self.point}")

    @staticmethod
    def _is_earlier(segment: Segment, position: int, end: int) -> bool:
        """Whether a sound batch at a position begins before `end`: an offset in front of it has changed."""
        if position >= segment.size:
            return False
        try:
            header = parse_header(segment.file.read(HEADER_SIZE, position), 0, segment.size - position)
            check(segment.file.read(header.size, position), 0, header)
        except DecodeError:
            return False
        return header.base_offset < end

    def _end_or_refuse(self, segment: Segment, position: int, reason: str, later: list[int]) -> None:
        """Return if the log may end at `position` of `segment`; OfflineLogError if it is damaged there."""
        behind = None
        if self.end < self.floor:
            behind = f"records up to offset {self.floor} were synced"
        elif not self.power_lost:
            try:
                behind = self._proof_behind(segment, position, later)
            except TooManyError as error:
                behind = str(error)
        if behind is not None:
            raise OfflineLogError(
                f"{segment.path}, position {position}: {reason}. This is no torn tail: {behind}. Nothing was cut; "
                "restore the file from a copy, or delete the topic."
            )

    def _proof_behind(self, segment: Segment, position: int, later: list[int]) -> str | None:
        """Say what shows that the bytes at `position` were sound once, None if nothing does."""
        file, size = segment.file, segment.size
        if position < size and is_whole_batch(file, position, size):
            return "it is a whole batch that has changed"
        at = sound_batch_behind(file, position - (position == 0), size, self.end)
        if at is not None:
            return f"a sound batch lies behind it ({file.path.name}, position {at})"
        for base in later:
            file = self._disk.open(path_of(self._directory, base))
            at = sound_batch_behind(file, -1, file.size(), self.end)
            if at is not None:
                return f"a sound batch lies behind it ({file.path.name}, position {at})"
        return None

    def _cut(self, segment: Segment, size: int, end: int, reason: str) -> None:
        """Cut a segment at position `size`, where the offset is `end`; the bytes behind are kept beside it."""
        kept = aside(self._disk, segment.path.with_name(f"{end:020d}"), ASIDE_SUFFIX)
        keep_bytes(self._disk, segment.file, size, segment.size, kept)
        logger.warning(
            "%s: cut at position %d of %d: %s. Offsets go on at %d; the bytes are kept as %s",
            *(segment.path, size, segment.size, reason, end, kept.name),
        )
        segment.truncate(size, end)


def scan(
    file: File,
    position: int,
    size: int,
    next_offset: int,
    visit: Callable[[int, BatchHeader], None],
    *,
    gaps_to: int = 0,
) -> Tail:
    """Check the batches from `position` to `size`: header, length, CRC, and that offsets go on from `next_offset`.

    `gaps_to`: the offset below which some may be missing.
    """
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
        if header.base_offset < next_offset or header.base_offset > max(next_offset, gaps_to):
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


def write_again(file: File, position: int, size: int) -> None:
    """Write the bytes from `position` to `size` as they are read, so that the next sync writes them to the disk.

    A sync that failed may have left them in the system's memory alone, called clean (ADR 0058); whether one has, nobody
    knows after a kill.
    """
    for at in range(position, size, SCAN_SIZE):
        file.write(file.read(min(SCAN_SIZE, size - at), at), at)


def base_of(name: str, suffix: str = LOG_SUFFIX) -> int | None:
    """The base offset in the name of a segment's file; None for another file."""
    stem = name[: -len(suffix)]
    return int(stem) if name.endswith(suffix) and is_whole(stem) else None


def _tidy(disk: Disk, directory: Path, start: int) -> list[int]:
    """Finish the interrupted operations on a log that starts at `start`; return the base offsets of the segments."""
    names = disk.names(directory)
    doomed = [directory / name for name in names if name.endswith((DISCARDED_SUFFIX, CLEANED_SUFFIX, ".tmp"))]
    bases = {base for name in names if (base := base_of(name)) is not None}
    swaps = [base for name in names if (base := base_of(name, LOG_SUFFIX + SWAP_SUFFIX)) is not None]
    for base in swaps:
        _finish_swap(disk, directory, base, bases, start, begins=bases.union(swaps))
    if doomed:
        disk.discard(doomed)
    return sorted(bases)


def _remove_strays(disk: Disk, directory: Path) -> None:
    """Remove indexes without a segment, as an interrupted removal leaves them; they could be built anew."""
    names = disk.names(directory)
    bases = {base_of(name) for name in names}
    strays = [
        directory / name
        for name in names
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX)
        if (base := base_of(name, suffix)) is not None and base not in bases
    ]
    if strays:
        disk.discard(strays)


def _finish_swap(disk: Disk, directory: Path, base: int, bases: set[int], start: int, *, begins: set[int]) -> None:
    """Put a compacted segment, which must be sound, in the place of those that it was made of.

    `begins`: where segments begin, those that are still to be put in place among them. A segment whose records were all
    deleted meanwhile is removed: what it was made of may be gone, and what was behind it.
    """
    swap = disk.open(path_of(directory, base, SWAP_SUFFIX))
    end = base

    def found(position: int, header: BatchHeader) -> None:
        nonlocal end
        end = header.next_offset

    tail = scan(swap, 0, swap.size(), base, found, gaps_to=OFFSET_MAX)
    if tail.reason is None and base < end <= start:
        disk.discard([swap.path])
        return
    replaced = [other for other in bases if base <= other < end]
    following = min((other for other in begins if other >= end), default=end)
    reason = tail.reason
    if reason is None and (end == base or following != end):
        reason = f"it ends at offset {end}, the next file begins at {following}"
    if reason is not None:
        raise OfflineLogError(f"{swap.path}: {reason}. Restore the file, or delete the topic.")
    _replace_by_swap(disk, directory, base, replaced)
    bases.difference_update(replaced)
    bases.add(base)


def remove_covered(disk: Disk, directory: Path, ranges: Sequence[tuple[int, int]]) -> None:
    """Remove the segments whose offsets others have, durably; may be interrupted and done again. Blocks; OSError."""
    bases = [base for name in disk.names(directory) if (base := base_of(name)) is not None]
    remove_replaced(disk, directory, [base for base in bases if any(start <= base < end for start, end in ranges)])


def remove_replaced(disk: Disk, directory: Path, replaced: list[int]) -> None:
    """Remove the segments that a compacted one replaces, durably; may be interrupted and done again. Blocks."""
    for other in sorted(replaced, reverse=True):
        disk.discard(Segment(disk, directory, other, 0).remove())
    disk.sync_directory(directory)


def _replace_by_swap(disk: Disk, directory: Path, base: int, replaced: list[int]) -> None:
    """Remove the segments `replaced` and give the compacted segment its name; may be interrupted and done again."""
    remove_replaced(disk, directory, replaced)
    disk.rename(path_of(directory, base, SWAP_SUFFIX), path_of(directory, base))
    disk.sync_directory(directory)
