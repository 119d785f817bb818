"""Lives of groups whose members share partitions by ranges of keys: at any moment a key has at most one owner.

`make simulate` lives many more of them, and `tests.sharing_mutations` breaks the rules one by one.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.groups import live, story
from tests.simulation.groups_theme import SHARERS_FROM, Theme
from tests.simulation.groups_world import World

LIVES = 12
LIVES_PER_TEST = 3


@pytest.mark.parametrize("first", range(SHARERS_FROM, SHARERS_FROM + LIVES, LIVES_PER_TEST + 1))
def test_whatever_fails_every_key_has_one_owner_and_is_read_in_order(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + LIVES_PER_TEST):
        counts += live(seed).rules.counts
    for name in ("parts", "commits by key", "commits by offset", "removed", "loads"):
        assert counts[name] > 0, f"these lives were dull: {counts}"


def test_lives_before_and_every_fourth_one_have_no_sharers() -> None:
    shared = [World(seed).theme.sharing > 0 for seed in (0, SHARERS_FROM - 1, *range(SHARERS_FROM, SHARERS_FROM + 4))]
    assert shared == [False, False, True, True, True, False]
    assert Theme.sharing == 0.0


def test_a_seed_reproduces_a_life_with_sharers_byte_for_byte() -> None:
    assert story(SHARERS_FROM) == story(SHARERS_FROM)
