"""When logs are cleaned, decided by their dirt and the time."""

from __future__ import annotations

import pytest

from anabranch.machines.cleaning import Dirt, Rules, Urgency, is_finished, rank, urgency_of

LAG_MS = 60_000
RULES = Rules(dirty_ratio_min=0.5, lag_max_ms=LAG_MS)


@pytest.mark.parametrize(
    ("dirt", "now_ms", "expected"),
    [
        (Dirt(), 0, None),
        (Dirt(clean_size=100), 10**9, None),
        (Dirt(50, 50, 0), 0, Urgency(0, 0.5)),
        (Dirt(51, 49, 0), LAG_MS, None),
        (Dirt(51, 49, 0), LAG_MS + 1, Urgency(1, 0.49)),
        (Dirt(51, 49, None), LAG_MS + 1, None),
        (Dirt(0, 1, 5), 0, Urgency(0, 1.0)),
    ],
)
def test_a_log_is_due_when_enough_is_dirty_or_a_record_has_waited_too_long(
    dirt: Dirt, now_ms: int, expected: Urgency | None
) -> None:
    assert urgency_of(dirt, RULES, now_ms) == expected


def test_with_a_ratio_of_zero_any_dirt_is_due_and_none_is_not() -> None:
    assert urgency_of(Dirt(10**9, 1), Rules(0.0), 0) is not None
    assert urgency_of(Dirt(10**9, 0), Rules(0.0), 0) is None


def test_the_longest_wait_comes_first_then_the_dirtiest() -> None:
    found = [None, Urgency(0, 0.9), Urgency(5, 0.1), Urgency(0, 1.0), Urgency(7, 0.0)]
    assert sorted(found, key=rank) == [Urgency(7, 0.0), Urgency(5, 0.1), Urgency(0, 1.0), Urgency(0, 0.9), None]


def test_a_segment_is_finished_once_its_first_record_has_waited() -> None:
    assert [is_finished(first, RULES, LAG_MS) for first in (None, 0, -1)] == [False, False, True]
    assert not is_finished(0, Rules(), 10**15)
