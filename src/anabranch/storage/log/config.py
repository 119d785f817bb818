"""The settings of a partition log: sizes, times, and the durability of readable records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from anabranch.base.limits import SEGMENT_SIZE_MIN, SMALL_SEGMENT_AGE_MS


class Durability(StrEnum):
    """When an appended record may be acknowledged and read (storage.md, section 2)."""

    FSYNC = "fsync"
    """After fdatasync, which concurrent producers share."""
    OS = "os"
    """After write: it survives a crash of the broker, not of the machine. Apache Kafka's default."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The settings of one partition log; replaced as a whole when the topic's configs change."""

    durability: Durability = Durability.FSYNC
    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * 24 * 3600 * 1000
    small_segment_bytes: int = SEGMENT_SIZE_MIN
    """A segment with fewer is finished by time only when it is `small_segment_ms` old for each segment of the log."""
    small_segment_ms: int = SMALL_SEGMENT_AGE_MS
    index_interval_bytes: int = 4096
    retention_ms: int = 7 * 24 * 3600 * 1000
    """-1: for ever."""
    retention_bytes: int = -1
    """-1: without limit."""
    delete: bool = True
    """`cleanup.policy` names delete."""
    compact: bool = False
    """`cleanup.policy` names compact."""
    delete_retention_ms: int = 24 * 3600 * 1000
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = (1 << 63) - 1
