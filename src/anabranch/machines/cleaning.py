"""When compacted logs are cleaned, and in which order (KIP-58, KIP-354).

    due       once its dirty part is `min.cleanable.dirty.ratio` of what may be cleaned, or a record of it has waited
              for `max.compaction.lag.ms`
    order     logs with records that have waited too long come first, the longest wait first; then the dirtiest ones

Only finished segments are cleaned, so a segment that takes appends is finished when its first record has waited for
`max.compaction.lag.ms`, whether or not other records come.
"""

from __future__ import annotations

from typing import NamedTuple

UNLIMITED_MS = 2**63 - 1


class Rules(NamedTuple):
    """The configs of a topic that say when its logs are cleaned."""

    dirty_ratio_min: float = 0.5
    lag_max_ms: int = UNLIMITED_MS


class Dirt(NamedTuple):
    """The segments of a log that may be cleaned now."""

    clean_size: int = 0
    """Bytes of those in which no key is twice."""
    dirty_size: int = 0
    oldest_dirty_ms: int | None = None
    """The least timestamp with which a dirty segment begins; None if that is not known."""


class Urgency(NamedTuple):
    """How urgent the cleaning of a log is: the greater one comes first."""

    overdue_ms: int
    dirty_ratio: float


def urgency_of(dirt: Dirt, rules: Rules, now_ms: int) -> Urgency | None:
    """Decide how urgent the cleaning of a log is; None if it is not due."""
    if not dirt.dirty_size:
        return None
    ratio = dirt.dirty_size / (dirt.clean_size + dirt.dirty_size)
    overdue_ms = 0 if dirt.oldest_dirty_ms is None else max(0, now_ms - dirt.oldest_dirty_ms - rules.lag_max_ms)
    return Urgency(overdue_ms, ratio) if overdue_ms or ratio >= rules.dirty_ratio_min else None


def is_finished(first_ms: int | None, rules: Rules, now_ms: int) -> bool:
    """Whether a segment whose first record is of `first_ms` is to take no more appends, so that it can be cleaned."""
    return first_ms is not None and now_ms - first_ms > rules.lag_max_ms


def rank(urgency: Urgency | None) -> tuple[bool, float, float]:
    """A key to sort by, the most urgent first; what is not due comes last."""
    return (True, 0, 0) if urgency is None else (False, -urgency.overdue_ms, -urgency.dirty_ratio)
