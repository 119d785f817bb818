"""Dropped segments of a log, removed a few at a time, so that a test may have a kill come in between."""

from __future__ import annotations

from anabranch.storage.log.log import LocalLog


def remove_some(log: LocalLog, most: int) -> None:
    """Remove the files of the oldest dropped segments, as a thread does."""
    log.dropped._remove(log.dropped._some(most))
