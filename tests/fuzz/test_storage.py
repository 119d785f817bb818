"""A share of the cases of the storage fuzzer."""

from __future__ import annotations

from tests.fuzz.storage import run


def test_what_was_synced_is_there_or_its_log_is_offline_with_a_sentence() -> None:
    outcomes = run(0, 30)
    assert sum(outcomes.values()) == 30
    assert any("offline" in outcome for outcome in outcomes)
