"""What the files of a log show, read without opening the log: for repairs, of files in any state. Blocks; OSError.

A compacted segment that has no name yet counts as one where a start would give it its name: what it was made of may be
removed. One that is damaged counts, too: it may be restored. Where it is sound and does not meet the next one, it is
one that an error has left over.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.machines.partition.producers import ProducerTable, origin
from anabranch.records.batch import OFFSET_MAX, BatchHeader, check
from anabranch.runtime.disk import Disk, OddFileError
from anabranch.storage.log.epochs import EpochsFile
from anabranch.storage.log.recovery import SWAP_SUFFIX, base_of, scan
from anabranch.storage.log.segment import LOG_SUFFIX, Segment
from anabranch.storage.log.snapshots import Snapshots

logger = logging.getLogger("anabranch.repair")


class LogSurvey(NamedTuple):
    """What was found."""

    first_base: int | None
    """The base offset of the first segment; None without one."""
    latest_epoch: int
    producer_id: int
    """The largest producer id; -1 without one."""
    damaged_snapshots: Sequence[Path] = ()


def survey(disk: Disk, directory: Path) -> LogSurvey:
    """Read the headers and snapshots of a log, as far as they are sound."""
    try:
        names = disk.names(directory)
    except NotADirectoryError:
        return LogSurvey(None, -1, -1)  # A file of such a name.
    bases = sorted(base for name in names if (base := base_of(name)) is not None)
    swaps = [base for name in names if (base := base_of(name, LOG_SUFFIX + SWAP_SUFFIX)) is not None]
    epochs = EpochsFile(disk, directory).load()
    newest, latest = -1, -1 if epochs is None else epochs.latest
    snapshots, damaged = Snapshots(disk, directory), list[Path]()
    for offset, data in snapshots.newest_first(1 << 62, passes_over=OddFileError):
        try:
            newest = max([newest, *(origin(producer_id)[0] for producer_id, _ in ProducerTable.restore(data))])
        except DecodeError:
            damaged.append(snapshots.path(offset))
    first = min(bases, default=None)
    files = sorted([*((base, "") for base in bases), *((base, SWAP_SUFFIX) for base in swaps)])
    for base, suffix in files:
        segment = _ordinary(disk, directory, base, suffix)
        if segment is None:
            first = base if first is None else min(first, base)
            continue
        with contextlib.suppress(DecodeError):
            for position, header in segment.walk():
                seen = origin(header.producer_id)[0] if header.producer_id >= 0 else -1
                if seen > newest and _is_sound(segment, position, header):
                    newest = seen
        if suffix and not _is_left_over(segment, (*bases, *swaps)):
            first = base if first is None else min(first, base)
    for base, suffix in reversed(files):
        segment = _ordinary(disk, directory, base, suffix)
        if segment is not None and (epoch := _last_epoch(segment)) >= 0:
            latest = max(latest, epoch)  # A power loss may have taken the file of epochs back.
            break
    return LogSurvey(first, latest, newest, damaged)


def _ordinary(disk: Disk, directory: Path, base: int, suffix: str) -> Segment | None:
    """A segment as its file is; None where that is no file, which a start refuses."""
    segment = Segment(disk, directory, base, 0, suffix=suffix)
    try:
        segment.load()
    except OddFileError as error:
        logger.warning("%s, and is passed over", error)
        return None
    return segment


def _is_left_over(swap: Segment, begins: Iterable[int]) -> bool:
    """Whether a compacted segment without a name is sound, and no segment begins where it ends."""
    end = swap.base_offset

    def visit(_: int, header: BatchHeader) -> None:
        nonlocal end
        end = header.next_offset

    reason = scan(swap.file, 0, swap.size, swap.base_offset, visit, gaps_to=OFFSET_MAX).reason
    return reason is None and swap.base_offset < end != min((other for other in begins if other >= end), default=end)


def _is_sound(segment: Segment, position: int, header: BatchHeader) -> bool:
    try:
        check(segment.file.read(header.size, position), 0, header)
    except DecodeError:
        return False
    return True


def _last_epoch(segment: Segment) -> int:
    """The leader epoch of the last of the sound batches with which a file begins; -1 without any."""
    epoch = -1

    def visit(_: int, header: BatchHeader) -> None:
        nonlocal epoch
        epoch = header.leader_epoch

    scan(segment.file, 0, segment.size, segment.base_offset, visit, gaps_to=OFFSET_MAX)
    return epoch
