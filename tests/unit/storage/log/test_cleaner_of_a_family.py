"""Compaction across a family: a log that is written anew for another one, before it was ever cleaned for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.runtime.disk import Disk
from anabranch.storage.log import cleaner, replacing, scrub
from anabranch.storage.log.cleaner import Member
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_keyed_batch

CONFIG = LogConfig(durability=Durability.OS, segment_bytes=300, index_interval_bytes=1, compact=True, delete=False)
KEYS = 8


def fill(log: LocalLog, value: bytes) -> None:
    for number in range(4 * KEYS):
        log.append(make_keyed_batch([(b"k%d" % (number % KEYS), value)]), 0, 0)
    log.finish_segment(log.end)
    log.flush()


@pytest.mark.parametrize("compacts", [True, False])
def test_a_log_that_is_written_anew_for_another_is_known_as_such_after_a_restart(
    tmp_path: Path, compacts: bool
) -> None:
    """`compacts`: whether its topic still does."""
    parent = LocalLog.open(tmp_path / "t-0", CONFIG, disk=Disk())
    child = LocalLog.open(tmp_path / "t-1", CONFIG, disk=Disk())
    fill(parent, b"older")
    fill(child, b"newer")
    cleaning = cleaner.plan(Member(child, 1, layouts=(1,)), 1_000, [Member(parent, 0)])
    for cleaned, log in zip(cleaning.run(), (child, parent), strict=True):
        replacing.finish(log, cleaned)
    assert parent.rewritten.to > 0, "superseded by the child"
    parent.close()

    parent = LocalLog.open(tmp_path / "t-0", replace(CONFIG, compact=compacts), disk=Disk())
    assert parent.rewritten.to > 0, "gates would open over records that are gone"
    for _, source in scrub.settled(parent):
        assert scrub.scrub(Disk(), tmp_path / "t-0", source, lambda size: None) is None, "gaps are no damage"
