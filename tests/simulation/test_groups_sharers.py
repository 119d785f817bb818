"""Lives of groups whose members share partitions by ranges of keys: at any moment a key has at most one owner.

`make simulate` lives many more of them, and `tests.sharing_mutations` breaks the rules one by one.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.simulation.groups import live, story
from tests.simulation.groups_shared_topics import SharedTopic
from tests.simulation.groups_stories import GROUP, quiet
from tests.simulation.groups_theme import SHARERS_FROM, Theme

LIVES = 12
LIVES_PER_TEST = 3


@pytest.mark.parametrize("first", range(SHARERS_FROM + 4, SHARERS_FROM + 4 + LIVES, LIVES_PER_TEST + 1))
def test_whatever_fails_every_key_has_one_owner_and_is_read_in_order(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + LIVES_PER_TEST):
        counts += live(seed).rules.counts
    for name, least in {"parts": 3, "commits by key": 20, "removed": 10}.items():
        assert counts[name] >= least, f"these lives were dull: {counts}"


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(2_001_441, id="keys that wait at a gate are done by others up to behind it"),
        pytest.param(2_024_884, id="the log ended with a marker where its leader said that the next record is"),
        pytest.param(2_025_612, id="a gate opens by time where an owner of all keys is not equally far in them"),
        pytest.param(2_030_105, id="a member with all keys commits them at several offsets"),
        pytest.param(2_040_105, id="keys come and go before a member that has committed nothing has read any of them"),
        pytest.param(3_050_728, id="a sharer that stands still is given more keys"),
        pytest.param(
            3_060_859, id="a static member comes back by the other protocol after it joined with fewer topics"
        ),
        pytest.param(3_061_091, id="a transaction is overtaken by one that ends first, and the log is read"),
    ],
)
def test_a_life_that_ended_badly_ends_well(seed: int) -> None:
    live(seed)


def test_lives_before_and_every_fourth_one_have_no_sharers() -> None:
    seeds = 0, SHARERS_FROM - 1, *range(SHARERS_FROM, SHARERS_FROM + 4)
    shared = [Theme.of_seed(seed, random.Random(seed)).sharing > 0 for seed in seeds]
    assert shared == [False, False, True, True, True, False]


def test_a_seed_reproduces_a_life_with_sharers_byte_for_byte() -> None:
    assert story(SHARERS_FROM) == story(SHARERS_FROM)


def test_keys_that_move_are_committed_before_they_go_so_that_no_record_comes_twice() -> None:
    with quiet(1, sharing=1.0, explicit=0.0, stock=0.0, commits=("auto",)) as world:
        topic = world.topic
        assert isinstance(topic, SharedTopic)
        topic.accepts_ranges = True
        world._put_topic(topic)
        clients = [world.start(GROUP)]
        for _ in range(2):
            for _ in range(37):  # Some time after an automatic commit.
                world.send_all()
                world.run_until(world.now_ms + 100)
            clients.append(world.start(GROUP))
        world.until(lambda: all(client.holds for client in clients) and world.missing() is None)
        assert world.edges[GROUP].first_deliveries == 74 * topic.keys
        assert world.edges[GROUP].repetitions == 0
