"""What the files of a log show, read without opening the log: for repairs, of files in any state. Blocks; OSError."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.machines.partition.producers import ProducerTable, origin
from anabranch.records.batch import BatchHeader
from anabranch.runtime.disk import Disk
from anabranch.storage.log.epochs import EpochsFile
from anabranch.storage.log.recovery import base_of, epochs_of_batches, scan
from anabranch.storage.log.segment import Segment
from anabranch.storage.log.snapshots import Snapshots


class LogSurvey(NamedTuple):
    """What was found."""

    first_base: int | None
    """The base offset of the first file; None without one."""
    latest_epoch: int
    producer_id: int
    """The largest producer id; -1 without one."""
    damaged_snapshots: Sequence[Path] = ()


def survey(disk: Disk, directory: Path) -> LogSurvey:
    """Read the headers and snapshots of a log, as far as they are sound."""
    bases = sorted(base for name in disk.names(directory) if (base := base_of(name)) is not None)
    epochs = EpochsFile(disk, directory).load() or epochs_of_batches(disk, directory)
    newest, latest = -1, epochs.latest
    last: Segment | None = None
    snapshots, damaged = Snapshots(disk, directory), list[Path]()
    for offset, data in snapshots.newest_first(1 << 62):
        try:
            newest = max([newest, *(origin(producer_id)[0] for producer_id, _ in ProducerTable.restore(data))])
        except DecodeError:
            damaged.append(snapshots.path(offset))
    for base in bases:
        segment = Segment(disk, directory, base, 0)
        segment.load()
        if segment.size:
            last = segment
        try:
            for _, header in segment.walk():
                if header.producer_id >= 0:
                    newest = max(newest, origin(header.producer_id)[0])
        except DecodeError:
            continue
    if last is not None:
        latest = max(latest, _last_epoch(last))  # A power loss may have taken the file of epochs back.
    return LogSurvey(bases[0] if bases else None, latest, newest, damaged)


def _last_epoch(segment: Segment) -> int:
    """The leader epoch of the last of the sound batches with which a file begins; -1 without any."""
    epoch = -1

    def visit(_: int, header: BatchHeader) -> None:
        nonlocal epoch
        epoch = header.leader_epoch

    scan(segment.file, 0, segment.size, segment.base_offset, visit, gaps=True)
    return epoch
