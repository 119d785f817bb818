"""Lives of groups whose applications commit in transactions: what is in doubt is not told, what is aborted comes again.

`make simulate` lives many more of them.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import Positions
from tests.simulation.groups import live, story
from tests.simulation.groups_theme import TRANSACTIONS_FROM, Theme

FIRST = TRANSACTIONS_FROM + 3
"""The first life without sharers: every fourth one is."""
LIVES = 12


def lives(first: int, count: int) -> Counter[str]:
    """Live the lives without sharers from a seed on."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + 4 * count, 4):
        counts += live(seed).rules.counts
    return counts


def test_whatever_fails_what_a_transaction_commits_counts_when_it_ends_well() -> None:
    counts = lives(FIRST, LIVES)
    for name, least in {"transactions": 100, "aborts": 20, "taken": 50, "removed": 10, "loads": 5}.items():
        assert counts[name] >= least, f"these lives were dull: {counts}"


def test_lives_before_have_no_transactions() -> None:
    seeds = FIRST - 4, FIRST + 1, *range(FIRST, FIRST + 40, 4)
    some = [Theme.of_seed(seed, random.Random(seed)).transactional > 0 for seed in seeds]
    assert some[:2] == [False, False] and any(some[2:]) and not all(some[2:])


def test_a_seed_reproduces_a_life_with_transactions_byte_for_byte() -> None:
    assert story(FIRST) == story(FIRST)


@pytest.mark.parametrize("wrong", ["what is in doubt is told", "what is aborted counts", "none is overtaken"])
def test_what_is_done_wrong_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Positions.end_transaction

    def always(positions: Positions, producer_id: int, *, committed: bool) -> list[tuple[str, tuple[str, int]]]:
        return end(positions, producer_id, committed=True)

    match wrong:
        case "what is in doubt is told":
            monkeypatch.setattr(Offsets, "is_unstable", lambda *_: False)
        case "what is aborted counts":
            monkeypatch.setattr(Positions, "end_transaction", always)
        case _:
            monkeypatch.setattr(Positions, "_overtake", lambda *_: None)
    first = FIRST + 20_000 if wrong != "none is overtaken" else 3_020_159
    with pytest.raises(AssertionError):
        lives(first, 20)
