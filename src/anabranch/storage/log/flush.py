"""The files a log must sync to be durable, and the rewriting of an unsynced tail after a failed sync.

The records of a segment are durable once its file is synced, and its name with it. The index of a finished segment is
synced along the way; an index that cannot be stored makes the log slower, not less durable, and is tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from anabranch.records.batch import BatchHeader
from anabranch.runtime.disk import Disk, File
from anabranch.storage.log.recovery import Tail, scan
from anabranch.storage.log.segment import Segment

logger = logging.getLogger("anabranch.storage.log")


@dataclass(frozen=True, slots=True)
class Flush:
    """The work of making a log durable up to `end`; made by `begin_flush`, given back to `end_flush`."""

    end: int
    files: tuple[File, ...]
    directories: tuple[Path, ...]
    segments: tuple[Segment, ...]
    indexed: tuple[Segment, ...]
    """The segments whose index is among the files."""
    generation: int
    disk: Disk

    def note_durable(self) -> None:
        """Note of the segments that they are synced: finished ones are closed."""
        for segment in self.segments:
            segment.durable_name = True
            if segment.end <= self.end:
                segment.unsynced = False
                if segment.sealed:
                    segment.release()
        for segment in self.indexed:
            segment.index.unsynced = False

    def run(self) -> None:
        """Sync. Blocks; may run in any thread."""
        for file in self.files:
            file.sync()
        for directory in self.directories:
            self.disk.sync_directory(directory)


def plan_flush(
    candidates: Iterable[Segment],
    *,
    flushed: int,
    end: int,
    generation: int,
    directory: Path,
    parent_durable: bool,
    disk: Disk,
) -> tuple[Flush, list[Segment]]:
    """Choose the files to sync, of segments that may be unsynced, and the segments whose index was not stored."""
    segments: list[Segment] = []
    indexed: list[Segment] = []
    files: list[File] = []
    directories: list[Path] = []
    left: list[Segment] = []
    for segment in candidates:
        index_due = segment.sealed and segment.index_unsynced
        if not segment.size or (segment.end <= flushed and not index_due):
            continue
        segments.append(segment)
        if segment.unsynced or segment.end > flushed:
            files.append(segment.file)
        if not segment.durable_name:
            directories = [directory]
        if index_due:
            try:
                files += segment.index.store()
                indexed.append(segment)
            except OSError:
                # Without its end it still is an index, only a slower one.
                left.append(segment)
    if directories and not parent_durable:
        directories.append(directory.parent)
    flush = Flush(
        end=end,
        files=tuple(files),
        directories=tuple(directories),
        segments=tuple(segments),
        indexed=tuple(indexed),
        generation=generation,
        disk=disk,
    )
    return flush, left


class Cut(NamedTuple):
    """Where a log is to end: what lies there is not read, it may be damaged."""

    offset: int
    position: int
    """In the segment that holds the offset."""


def tail_to_cut(segments: Sequence[Segment], synced: int, *, is_seen: bool) -> Cut | None:
    """Where to cut a log from `synced` on, which is in the first of these segments, as no sync of it has succeeded.

    What readers may have seen is not taken back: the kernel is made to write it again, up to the first damaged batch.
    """
    if not is_seen:
        return Cut(synced, segments[0].position_at(synced))
    for segment in segments:
        if segment.created:
            sound, tail = _write_again(segment, max(synced, segment.base_offset))
            if tail.reason is not None:
                logger.warning("%s: position %d: %s", segment.path, tail.size, tail.reason)
                return Cut(sound, tail.size)
    return None


def _write_again(segment: Segment, start: int) -> tuple[int, Tail]:
    """Make the kernel write the batches from the offset `start` on once more; up to where they are sound."""
    sound = start

    def rewrite(position: int, header: BatchHeader) -> None:
        nonlocal sound
        segment.file.write(segment.file.read(header.size, position), position)
        sound = header.next_offset

    tail = scan(segment.file, segment.position_at(start), segment.size, start, rewrite)
    return sound, tail
