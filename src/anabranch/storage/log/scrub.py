"""Scrubbing: comparing the checksums of batches that nobody reads, to find bits that have changed on the disk.

What is synced does not change: finished segments, and the active one below the synced end. Their batches are read at a
bounded rate, in a thread. A finding is noted beside the log (`FINDING_FILE`), so that the next start does not serve the
batch either: while it is unsound the log stays offline; where the file was restored, the note goes. A damaged note
still says that there was something: then all of the log is compared before it is served.

What is compared may be replaced meanwhile, by a compacted segment that begins at the same offset: a finding counts
where the segment is still the same one. A compacted segment is compared once its file has its name.

Not compared is what no checksum covers: the leader epoch of a batch. A changed base offset shows by the batch behind
it, or by the end of the segment.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from anabranch.records.batch import OFFSET_MAX, BatchHeader
from anabranch.records.checksum import crc32c
from anabranch.runtime.disk import Disk
from anabranch.storage.log.batch_files import Source
from anabranch.storage.log.damage import DAMAGED_SUFFIX, aside, keep_bytes, keep_damaged
from anabranch.storage.log.errors import OfflineLogError
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.recovery import FINDING_FILE, scan
from anabranch.storage.log.segment import Segment, path_of

logger = logging.getLogger("anabranch.storage.log")

BATCH_COST = 4096
"""Bytes that a batch counts at least: small ones take the processor's time."""


class Finding(NamedTuple):
    """A batch that is not sound."""

    path: Path
    position: int
    offset: int
    """Behind the last sound batch."""
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path}, position {self.position}, offset {self.offset}: {self.reason}. It was sound when it was "
            "written. Nothing was cut; restore the file from a copy, or delete the topic."
        )


class Settled(NamedTuple):
    """What a segment has that does not change any more."""

    segment: Segment
    source: Source


def settled(log: LocalLog) -> list[Settled]:
    """List what a log has that does not change any more. OSError, OfflineLogError."""
    found = []
    for segment in log.segments:
        if not segment.is_named:
            continue
        if segment.sealed and segment.end <= log.flushed:
            found.append(Settled(segment, Source(segment.base_offset, segment.end, segment.size)))
        elif segment.base_offset < log.flushed:
            end = min(log.flushed, segment.end)
            size = segment.size if end == segment.end else segment.locate(end)
            found.append(Settled(segment, Source(segment.base_offset, end, size)))
    return found


def scrub(disk: Disk, directory: Path, source: Source, pause: Callable[[int], None]) -> Finding | None:
    """Compare every checksum; `pause` is told of bytes before more are read. Blocks.

    OSError; FileNotFoundError where the segment is gone, or is being replaced.
    """
    path = path_of(directory, source.base_offset)
    file = disk.open(path)
    following = source.base_offset

    def found(position: int, header: BatchHeader) -> None:
        nonlocal following
        following = header.next_offset
        pause(max(header.size, BATCH_COST))

    # Offsets may be missing in any segment: one that was compacted for another log need not say so. A base offset that
    # has changed shows as well, in the next batch, or in the end.
    tail = scan(file, 0, min(source.size, file.size()), source.base_offset, found, gaps_to=OFFSET_MAX)
    reason = tail.reason
    if reason is None and tail.size < source.size:
        reason = f"the file ends here, {source.size} bytes were in it"
    if reason is None and following != source.end:
        reason = f"the next segment begins at offset {source.end}"
    return None if reason is None else Finding(path, tail.size, following, reason)


def is_as_it_was(log: LocalLog, compared: Settled) -> bool:
    """Whether a segment is still in a log with the bytes that were compared."""
    segments, segment = log.segments, compared.segment
    there = segments[segments.index_of(segment.base_offset)] if segments else None
    return there is segment and segment.size >= compared.source.size


def note(disk: Disk, directory: Path, finding: Finding, source: Source) -> None:
    """Note a finding beside its log, durably. Blocks; OSError."""
    data = json.dumps([list(source), str(finding)]).encode()
    disk.replace(directory / FINDING_FILE, data + b"\n%08x\n" % crc32c(data))


def check_finding(disk: Disk, directory: Path) -> bool:
    """Refuse to open a log with a batch that a scrub found unsound and that still is. Blocks; OSError, OfflineLogError.

    Return whether the note is damaged: then the log may be opened for `check_all`.
    """
    path = directory / FINDING_FILE
    if not disk.exists(path):
        return False
    data = disk.read(path)
    try:
        source = _noted(data)
    except (ValueError, TypeError) as error:
        logger.warning("%s is damaged (%s): all that the log has is compared before it is served", path, error)
        return True
    try:
        found = scrub(disk, directory, source, lambda size: None)
    except FileNotFoundError:
        found = None  # Retention has deleted the segment, or compaction replaced it, before the log went offline.
    if found is not None:
        raise OfflineLogError(str(found))
    disk.unlink(path)
    return False


def _noted(data: bytes) -> Source:
    """Read the segment of a note; earlier versions wrote no checksum. ValueError, TypeError if it is damaged."""
    text, newline, rest = data.partition(b"\n")
    if newline and rest != b"%08x\n" % crc32c(text):
        raise ValueError("the content does not fit its checksum")
    noted, _ = json.loads(text)
    return Source(*map(int, noted))


def check_all(log: LocalLog) -> None:
    """Compare every checksum of a log that was just opened, whose note is damaged. Blocks; OSError, OfflineLogError.

    The damaged note is kept aside; but a note stays in its place until the log is known to be sound.
    """
    disk, path = log.disk, log.directory / FINDING_FILE
    for _, source in settled(log):
        found = scrub(disk, log.directory, source, lambda size: None)
        if found is not None:
            file = disk.open(path)
            keep_bytes(disk, file, 0, file.size(), aside(disk, path, DAMAGED_SUFFIX))
            note(disk, log.directory, found, source)
            raise OfflineLogError(str(found))
    logger.warning("%s: the log is sound; kept as %s", path, keep_damaged(disk, path).name)
