"""Which segments retention deletes: whole ones, from the oldest on, below the high watermark, by age and by size."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.runtime.disk import Disk
from anabranch.storage.log.config import LogConfig
from anabranch.storage.log.retention import retained_from
from anabranch.storage.log.segment import MaxTimestamp, Segment
from anabranch.storage.log.segments import Segments

HIGH_WATERMARK = 40
NOW_MS = 10_000


def segments(*newest_ms: int, size: int = 100) -> Segments:
    """Segments of ten offsets each, from 0 on, by their largest timestamp; -1 where they have none."""
    found = Segments()
    for index, timestamp in enumerate(newest_ms):
        segment = Segment(Disk(), Path("t-0"), 10 * index, 4096)
        segment.end, segment.size = 10 * (index + 1), size
        segment.max_timestamp = MaxTimestamp(timestamp, segment.end - 1)
        found.append(segment)
    return found


@pytest.mark.parametrize(
    ("retention_ms", "expected"), [(-1, 0), (0, 40), (999, 40), (1_000, 30), (2_000, 20), (8_999, 0), (8_000, 10)]
)
def test_segments_go_when_their_newest_record_is_too_old(retention_ms: int, expected: int) -> None:
    log = segments(1_001, 7_000, 8_999, 9_000)
    assert retained_from(log, LogConfig(retention_ms=retention_ms), 0, HIGH_WATERMARK, NOW_MS) == expected


def test_a_young_segment_keeps_the_older_looking_ones_behind_it() -> None:
    log = segments(1_000, 9_999, 1_000)
    assert retained_from(log, LogConfig(retention_ms=500), 0, HIGH_WATERMARK, NOW_MS) == 10


def test_records_without_a_timestamp_never_are_too_old() -> None:
    assert retained_from(segments(-1, 1), LogConfig(retention_ms=0), 0, HIGH_WATERMARK, NOW_MS) == 0


@pytest.mark.parametrize(
    ("retention_bytes", "expected"), [(-1, 0), (0, 30), (99, 30), (100, 30), (101, 20), (299, 10), (300, 10), (400, 0)]
)
def test_segments_go_while_the_others_have_the_bytes_that_are_to_be_kept(retention_bytes: int, expected: int) -> None:
    config = LogConfig(retention_ms=-1, retention_bytes=retention_bytes)
    assert retained_from(segments(1, 1, 1, 1), config, 0, HIGH_WATERMARK, NOW_MS) == expected


def test_nothing_goes_above_the_high_watermark() -> None:
    assert retained_from(segments(1, 1, 1), LogConfig(retention_ms=0), 0, 29, NOW_MS) == 20


def test_a_log_that_is_only_compacted_keeps_everything() -> None:
    config = LogConfig(retention_ms=0, retention_bytes=0, delete=False, compact=True)
    assert retained_from(segments(1, 1), config, 7, HIGH_WATERMARK, NOW_MS) == 7


def test_an_empty_active_segment_stays() -> None:
    log = segments(1, -1)
    log[-1].size, log[-1].end = 0, 10
    assert retained_from(log, LogConfig(retention_ms=0, retention_bytes=0), 0, HIGH_WATERMARK, NOW_MS) == 10
