"""Groups of stock consumers: the edge says by itself when a key goes back, whatever the coordinator believes."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from anabranch.machines.groups.gatekeeper import Gatekeeper
from tests.simulation.groups import live
from tests.simulation.groups_rules import Rules
from tests.support.application_edge import OrderError
from tests.support.thorough import thorough

SEEDS = thorough(200, 12)
GROWING: dict[str, Any] = {
    "stock_groups": 1.0,
    "classic": 0.0,
    "ordered": 1.0,
    "topics": 15,
    "pace_ms": 300,
    "records_ms": 300,
    "keys": 4,
    "markers": 0.0,
    "crashes": 0,
    "faults": 0.0,
    "length_ms": 15_000,
}
"""All members are stock consumers, and topics are resized often."""


@pytest.fixture(autouse=True)
def rules_that_trust_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a coordinator hands out is not compared with what it knows: only what applications are handed counts."""
    monkeypatch.setattr(Rules, "_granted", lambda *_: None)


def test_keys_are_in_order_at_the_edge_of_groups_of_stock_consumers() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        for edge in live(seed, **GROWING).edges.values():
            counts.update(moved=edge.moves, first=edge.first_deliveries, again=edge.repetitions)
    assert counts["moved"] >= SEEDS and counts["first"] >= 80 * SEEDS, f"these lives were dull: {counts}"


def test_who_is_handed_a_partition_before_its_turn_is_found_out_at_the_edge() -> None:
    """The coordinator hands out what lies behind closed gates, and nothing else looks at that."""

    def lives() -> None:
        for seed in range(SEEDS):
            live(seed, **GROWING)

    with mock.patch.object(Gatekeeper, "_is_closed", return_value=False), pytest.raises(AssertionError) as failure:
        lives()
    assert isinstance(failure.value.__cause__, OrderError)
