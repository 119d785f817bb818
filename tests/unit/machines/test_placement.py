"""Linear hashing: the facts of ordering.md, section 2, on which everything else rests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.machines.placement import ancestor, place

hashes = st.integers(0, 2**31 - 1)
initials = st.integers(1, 12)
growths = st.integers(0, 90)


@given(hashes, initials, growths)
def test_a_key_has_a_partition_that_exists(key_hash: int, initial: int, growth: int) -> None:
    assert 0 <= place(key_hash, initial, initial + growth) < initial + growth


@given(hashes, initials, st.integers(0, 6))
def test_at_full_levels_the_placement_is_the_java_clients(key_hash: int, initial: int, level: int) -> None:
    assert place(key_hash, initial, initial << level) == key_hash % (initial << level)


@given(hashes, initials, growths, growths)
def test_growing_moves_a_key_to_one_new_partition_or_not_at_all(h: int, initial: int, a: int, b: int) -> None:
    old, new = initial + min(a, b), initial + max(a, b)
    before, after = place(h, initial, old), place(h, initial, new)
    assert after == before or after >= old
    assert ancestor(after, old, initial) == before


@given(hashes, initials, growths, growths)
def test_shrinking_undoes_growing_and_never_moves_a_survivors_key(h: int, initial: int, a: int, b: int) -> None:
    new, old = initial + min(a, b), initial + max(a, b)
    before, after = place(h, initial, old), place(h, initial, new)
    assert after == ancestor(before, new, initial)
    if before < new:
        assert after == before


@given(st.integers(0, 2000), initials)
def test_the_first_ancestor_of_all_is_the_remainder(partition: int, initial: int) -> None:
    assert ancestor(partition, initial, initial) == partition % initial


@given(st.lists(hashes, max_size=50), initials, growths)
def test_a_column_of_hashes_is_placed_as_each_hash_is(column: list[int], initial: int, growth: int) -> None:
    placed = place(np.array(column, dtype=np.int64), initial, initial + growth)
    assert placed.tolist() == [place(h, initial, initial + growth) for h in column]
