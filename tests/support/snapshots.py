"""The snapshots of producers beside a log."""

from __future__ import annotations

from anabranch.storage.interface import PartitionLog
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.snapshots import Snapshots


def snapshots_of(log: PartitionLog) -> list[tuple[int, bytes]]:
    """Those that fit the log, newest first, each with the end it was taken at."""
    assert isinstance(log, LocalLog)
    return list(Snapshots(log.disk, log.directory).newest_first(log.end))
