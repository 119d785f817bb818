"""Turns: any broker, then each known one, and those that cannot be reached seldom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from anabranch.client.cluster.turns import UNREACHABLE_TURNS, Turns

NODES = st.sets(st.integers(0, 9), min_size=1)


@given(NODES, st.sets(st.integers(0, 9)), st.integers(0, 60))
def test_every_broker_in_reach_is_asked_as_often_and_one_out_of_reach_once_in_many_turns(
    nodes: set[int], lost: set[int], count: int
) -> None:
    turns, asked = Turns(), Counter[int | None]()
    for _ in range(count):
        node = turns.next(nodes)
        assert turns.is_heard
        asked[node] += 1
        if node in lost:
            turns.unreachable()
            assert not turns.is_heard
    heard = [asked[node] for node in (None, *(nodes - lost))]
    assert max(heard) - min(heard) <= 1
    assert all(asked[node] <= -(-max(heard) // UNREACHABLE_TURNS) + 1 for node in nodes & lost)
    assert turns.all_asked(nodes) == (nodes <= asked.keys())
    assert not turns.all_asked({*nodes, 10})
    assert count <= len(nodes) or turns.all_asked(nodes), "each once, before any a second time"


def test_a_broker_that_becomes_known_is_next() -> None:
    turns = Turns()
    assert [turns.next([1]) for _ in range(4)] == [None, 1, None, 1]
    assert turns.next([1, 2]) == 2
