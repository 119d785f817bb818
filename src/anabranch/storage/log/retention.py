"""Retention: which whole segments are past `retention.ms`, or above `retention.bytes` (`cleanup.policy=delete`)."""

from __future__ import annotations

from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.segments import Segments


def retained_from(segments: Segments, config: LogConfig, start: int, high_watermark: int, now_ms: int) -> int:
    """Find the offset at which a log would start if retention were done now; `start` is where it starts."""
    if not config.delete:
        return start
    excess = segments.size - config.retention_bytes if config.retention_bytes >= 0 else 0
    for segment in segments:
        newest = segment.max_timestamp.timestamp
        expired = newest >= 0 and 0 <= config.retention_ms < now_ms - newest
        too_much = segment is not segments[-1] and excess >= segment.size
        if not segment.size or segment.end > high_watermark or not (expired or too_much):
            break
        start = segment.end
        excess -= segment.size
    return start
