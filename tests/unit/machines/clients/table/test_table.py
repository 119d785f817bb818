"""The table machine: which keys are in memory, and which changes a commit takes along."""

from __future__ import annotations

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.table import KeyLoadingError, KeyNotOwnedError, Table
from anabranch.machines.clients.table.table import place_of
from anabranch.machines.clients.table.values import without
from anabranch.machines.keyspace import SPACE, Interval, cuts, interval
from anabranch.machines.lineage import Lineage

PARENT, CHILD = TopicPartition("t", 0), TopicPartition("t", 1)
KEYS = [b"key-%d" % number for number in range(200)]
ONE = Lineage.of_ends(1, (1,))
GROWN = Lineage.of_ends(1, (1, 2), [{0: 10}])
SHRUNK = Lineage.of_ends(1, (1, 2, 1), [{0: 10}, {0: 20, 1: 5}])
EMPTY_BETWEEN = Lineage.of_ends(1, (1, 2, 1), [{0: 10}, {0: 10, 1: 5}])
LOWER, UPPER = (
    [key for key in KEYS if place_of(key, 1)[1] <= interval(0, 2, 1).end],
    [key for key in KEYS if place_of(key, 1)[1] > interval(0, 2, 1).end],
)


def load(table: Table, entries: dict[bytes, bytes]) -> list[Interval]:
    """Carry out all loads, from a changelog with these entries of all keys; return what was loaded."""
    loads = table.take_loads()
    for each in loads:
        table.fill(each, entries.items())
        table.loaded(each)
    return [each.piece.interval for each in loads]


def owning(entries: dict[bytes, bytes] | None = None, lineage: Lineage = ONE) -> Table:
    """A table whose consumer reads all of partition 0 in its first layout."""
    table = Table()
    assert not table.admit(lineage, PARENT, 0, 5)
    load(table, entries or {})
    assert table.admit(lineage, PARENT, 0, 5)
    return table


def flush(table: Table, **offsets: int) -> dict[bytes, bytes | None]:
    """Commit offsets of partitions 0 (`parent`) and 1 (`child`); return what was written."""
    names = {"parent": PARENT, "child": CHILD}
    wrote = {
        write.key: write.value
        for writes in table.writes({names[name]: offset for name, offset in offsets.items()})
        for write in writes
    }
    for _ in table.flushed():
        pass
    return wrote


def test_records_wait_until_their_keys_are_loaded() -> None:
    table = Table()
    assert not table.admit(ONE, PARENT, 3, 5)
    (begun,) = table.take_loads()
    assert (begun.family, begun.piece.interval) == (0, SPACE)
    with pytest.raises(KeyLoadingError):
        table.get(KEYS[0])
    assert table.fill(begun, [(KEYS[0], b"1"), (KEYS[1], b"2"), (KEYS[0], None), (KEYS[2], b"3"), (KEYS[2], b"4")])
    assert not table.admit(ONE, PARENT, 3, 5) and table.take_loads() == []
    table.loaded(begun)
    assert table.admit(ONE, PARENT, 3, 5)
    assert [table.get(key) for key in KEYS[:3]] == [None, b"2", b"4"]
    assert (table.entries, table.size) == (2, len(KEYS[1]) + len(KEYS[2]) + 2)


def test_a_load_that_fails_is_asked_for_again() -> None:
    table = Table()
    table.admit(ONE, PARENT, 0, 1)
    (begun,) = table.take_loads()
    table.fill(begun, [(KEYS[0], b"1")])
    table.failed(begun)
    assert not table.wants(begun) and not table.fill(begun, [(KEYS[1], b"1")])
    assert not table.admit(ONE, PARENT, 0, 1)
    assert load(table, {}) == [SPACE]
    assert table.items() == []


def test_a_load_that_begins_again_forgets_what_it_had() -> None:
    table = Table()
    table.admit(ONE, PARENT, 0, 1)
    (begun,) = table.take_loads()
    table.fill(begun, [(KEYS[0], b"1")])
    table.restart(begun)
    table.fill(begun, [(KEYS[1], b"2")])
    table.loaded(begun)
    assert table.items() == [(KEYS[1], b"2")]


def test_nothing_is_owned_before_and_after() -> None:
    table = Table()
    with pytest.raises(KeyNotOwnedError):
        table.get(KEYS[0])
    table = owning({KEYS[0]: b"1"})
    table.put(KEYS[1], b"2", 1)
    table.release([PARENT])
    for call in (table.get, lambda key: table.put(key, b"3", 1)):
        with pytest.raises(KeyNotOwnedError):
            call(KEYS[0])
    assert table.unflushed() == set() and table.unflushed_size == 0
    while table.sweep(7):
        pass
    assert (table.entries, table.size) == (0, 0)


def test_growth_takes_the_upper_keys_once_the_parents_segment_is_processed() -> None:
    table = owning(dict.fromkeys(KEYS, b"1"), GROWN)
    table.advance(GROWN, {PARENT: 9})
    assert table.get(UPPER[0]) == b"1"
    table.advance(GROWN, {PARENT: 10})
    assert table.get(LOWER[0]) == b"1"
    for key in UPPER:
        with pytest.raises(KeyNotOwnedError):
            table.get(key)
    assert sorted(key for key, _ in table.items()) == sorted(LOWER)
    assert table.entries == len(KEYS)
    while table.sweep(10):
        pass
    assert table.entries == len(LOWER)
    assert sorted(key for key, _ in table.items()) == sorted(LOWER)


def test_what_is_in_memory_is_counted_through_all_of_it() -> None:
    table = owning(dict.fromkeys(KEYS, b"1"), GROWN)
    table.advance(GROWN, {PARENT: 10})
    table.sweep(20)
    table.release([PARENT])
    while table.sweep(7):
        pass
    assert (table.entries, table.size) == (0, 0)


def test_the_child_loads_its_keys_even_where_the_parent_has_them_in_memory() -> None:
    table = owning(dict.fromkeys(KEYS, b"1"), GROWN)
    assert not table.admit(GROWN, CHILD, 0, 1)
    assert load(table, dict.fromkeys(KEYS, b"2")) == [interval(1, 2, 1)]
    assert table.admit(GROWN, CHILD, 0, 1)
    assert table.get(UPPER[0]) == b"2"
    assert table.get(LOWER[0]) == b"1"


def test_changes_of_the_parent_are_flushed_before_the_child_loads_their_keys() -> None:
    table = owning(lineage=GROWN)
    table.put(UPPER[0], b"1", 5)
    assert not table.admit(GROWN, CHILD, 0, 1)
    assert table.flush_wanted and table.take_loads() == []
    assert flush(table, parent=10) == {UPPER[0]: b"1"}
    table.advance(GROWN, {PARENT: 10})
    assert not table.flush_wanted and not table.admit(GROWN, CHILD, 0, 1)
    assert load(table, {UPPER[0]: b"1"}) == [interval(1, 2, 1)]


def test_shrinking_loads_what_comes_back_and_keeps_the_rest() -> None:
    table = Table()
    table.admit(SHRUNK, PARENT, 10, 20)
    assert load(table, dict.fromkeys(KEYS, b"1")) == [interval(0, 2, 1)]
    assert table.admit(SHRUNK, PARENT, 10, 20)
    assert not table.admit(SHRUNK, PARENT, 15, 25)
    assert load(table, dict.fromkeys(KEYS, b"2")) == [interval(1, 2, 1)]
    assert table.admit(SHRUNK, PARENT, 15, 25)
    table.advance(SHRUNK, {PARENT: 22})
    assert table.admit(SHRUNK, PARENT, 22, 25)
    assert {table.get(key) for key in LOWER} == {b"1"}
    assert {table.get(key) for key in UPPER} == {b"2"}


def test_keys_that_went_and_came_back_are_loaded_again_although_no_record_lies_between() -> None:
    table = owning(dict.fromkeys(KEYS, b"1"), EMPTY_BETWEEN)
    table.advance(EMPTY_BETWEEN, {PARENT: 10})
    assert not table.admit(EMPTY_BETWEEN, PARENT, 10, 12)
    assert load(table, dict.fromkeys(KEYS, b"2")) == [interval(1, 2, 1)]
    assert {table.get(key) for key in UPPER} == {b"2"}
    assert {table.get(key) for key in LOWER} == {b"1"}


def test_keys_of_the_first_segment_alone_go_with_it_where_records_of_two_were_admitted_at_once() -> None:
    table = Table()
    assert not table.admit(GROWN, PARENT, 5, 15)
    assert load(table, dict.fromkeys(KEYS, b"1")) == [SPACE]
    assert table.admit(GROWN, PARENT, 5, 15)
    table.advance(GROWN, {PARENT: 15})
    assert table.get(LOWER[0]) == b"1"
    with pytest.raises(KeyNotOwnedError):
        table.get(UPPER[0])


def test_a_partition_that_retires_keeps_no_keys() -> None:
    table = Table()
    table.admit(SHRUNK, CHILD, 0, 5)
    load(table, dict.fromkeys(KEYS, b"1"))
    assert table.get(UPPER[0]) == b"1"
    table.advance(SHRUNK, {CHILD: 5})
    with pytest.raises(KeyNotOwnedError):
        table.get(UPPER[0])


def test_a_layout_that_is_forgotten_is_no_proof_of_ownership() -> None:
    table = owning(dict.fromkeys(KEYS, b"1"))
    later = Lineage.of_ends(1, (2, 1), [{0: 30, 1: 5}], first=3)
    table.advance(later, {PARENT: 30})
    assert not table.admit(later, PARENT, 30, 31)
    assert load(table, {}) == [SPACE]


def test_a_share_is_all_that_is_loaded_and_kept() -> None:
    first, second, third = cuts(SPACE, 3)
    table = Table()
    assert not table.admit(ONE, PARENT, 0, 5, [first, third])
    assert load(table, dict.fromkeys(KEYS, b"1")) == [first, third]
    of = {
        key: next(n for n, cut in enumerate((first, second, third)) if cut.start <= place_of(key, 1)[1] <= cut.end)
        for key in KEYS
    }
    assert {key for key, _ in table.items()} == {key for key in KEYS if of[key] != 1}
    table.keep_to(PARENT, [second, third])
    assert not table.admit(ONE, PARENT, 0, 5, [second, third])
    assert load(table, dict.fromkeys(KEYS, b"2")) == [second]
    assert dict(table.items()) == {key: b"1" if of[key] == 2 else b"2" for key in KEYS if of[key] != 0}


def test_changes_of_keys_that_left_do_not_overwrite_what_their_next_owner_has_committed() -> None:
    """Of records above the stable offset nothing is flushed before a range leaves: its next owner does them again."""
    lower, upper = cuts(SPACE, 2)
    table = owning(dict.fromkeys(KEYS, b"0"))
    table.put(LOWER[0], b"mine", 101)
    table.put(UPPER[0], b"old", 102)
    assert flush(table, parent=90) == {}
    table.part(PARENT, [upper])
    for call in (table.get, lambda key: table.put(key, b"late", 102)):
        with pytest.raises(KeyNotOwnedError):
            call(UPPER[0])
    assert (table.get(LOWER[0]), table.unflushed_size) == (b"mine", len(LOWER[0]) + len(b"mine"))
    assert not table.admit(ONE, PARENT, 150, 151) and not table.flush_wanted
    assert load(table, dict.fromkeys(KEYS, b"theirs")) == [upper]
    assert table.admit(ONE, PARENT, 150, 151)
    assert (table.get(LOWER[0]), table.get(UPPER[0])) == (b"mine", b"theirs")
    wrote = [write for some in table.writes({PARENT: [(*lower, 150), (*upper, 200)]}) for write in some]
    assert [(write.key, write.value) for write in wrote] == [(LOWER[0], b"mine")]


def test_changes_of_keys_that_left_block_no_partition_that_they_move_to() -> None:
    upper = cuts(SPACE, 2)[1]
    grown = Lineage.of_ends(1, (1, 2), [{0: 300}])
    table = owning()
    table.put(UPPER[0], b"old", 102)
    table.part(PARENT, [upper])
    assert (table.unflushed(), table.unflushed_size) == (set(), 0)
    table.advance(grown, {PARENT: 300})
    assert not table.admit(grown, CHILD, 0, 1) and not table.flush_wanted
    assert load(table, {UPPER[0]: b"theirs"}) == [upper]
    assert table.admit(grown, CHILD, 0, 1)
    assert table.get(UPPER[0]) == b"theirs"


def test_keys_that_left_during_a_flush_are_not_taken_over_from_it() -> None:
    upper = cuts(SPACE, 2)[1]
    table = owning()
    table.put(LOWER[0], b"1", 3)
    table.put(UPPER[0], b"1", 3)
    list(table.writes({PARENT: 3}))
    table.part(PARENT, [upper])
    assert not table.admit(ONE, PARENT, 3, 5)
    load(table, {UPPER[0]: b"theirs"})
    list(table.flushed())
    assert (table.get(LOWER[0]), table.get(UPPER[0]), table.unflushed_size) == (b"1", b"theirs", 0)


def test_what_is_being_loaded_as_some_of_it_leaves_is_loaded_anew() -> None:
    lower, upper = cuts(SPACE, 2)
    table = Table()
    assert not table.admit(ONE, PARENT, 0, 5)
    (begun,) = table.take_loads()
    table.part(PARENT, [upper])
    assert not table.wants(begun)
    assert not table.admit(ONE, PARENT, 0, 5, [lower])
    assert load(table, dict.fromkeys(KEYS, b"1")) == [lower]


def test_keys_that_were_read_beyond_a_segment_are_not_loaded_for_its_records() -> None:
    """A range that arrives from behind moves the position back: other keys have left with their segment already."""
    lower, upper = cuts(SPACE, 2)
    cut = cuts(upper, 2)[0].end
    table = Table()
    table.admit(GROWN, CHILD, 0, 5, [Interval(upper.start, cut)])
    assert load(table, dict.fromkeys(KEYS, b"1")) == [Interval(upper.start, cut)]
    moved = next(key for key in UPPER if place_of(key, 1)[1] <= cut)
    floor = [(0, cut, 12), (cut + 1, SPACE.end, 3)]
    assert not table.admit(GROWN, PARENT, 3, 12, floor=floor)
    assert load(table, dict.fromkeys(KEYS, b"2")) == [Interval(cut + 1, SPACE.end), lower]
    assert table.admit(GROWN, PARENT, 3, 12, floor=floor)
    assert table.admit(GROWN, CHILD, 0, 5, [Interval(upper.start, cut)])
    assert table.get(moved) == b"1"


def test_keys_of_another_family_are_not_taken() -> None:
    two = Lineage.of_ends(2, (2,))
    table = Table()
    table.admit(two, CHILD, 0, 1)
    load(table, dict.fromkeys(KEYS, b"1"))
    assert {key for key, _ in table.items()} == {key for key in KEYS if place_of(key, 2)[0] == 1}


def test_a_change_is_seen_at_once_and_written_once() -> None:
    table = owning({KEYS[0]: b"1", KEYS[1]: b"1"})
    table.put(KEYS[0], b"2", 3)
    table.put(KEYS[0], b"3", 3)
    table.put(KEYS[1], None, 4)
    assert (table.get(KEYS[0]), table.get(KEYS[1])) == (b"3", None)
    assert table.items() == [(KEYS[0], b"3")]
    assert table.unflushed() == {PARENT}
    assert flush(table, parent=4) == {KEYS[0]: b"3", KEYS[1]: None}
    assert flush(table, parent=4) == {}
    assert table.items() == [(KEYS[0], b"3")]
    assert (table.unflushed(), table.unflushed_size, table.entries) == (set(), 0, 1)


def test_a_commit_takes_along_no_change_of_a_record_behind_its_offset() -> None:
    table = owning()
    table.put(KEYS[0], b"1", 3)
    table.put(KEYS[1], b"1", 5)
    table.put(KEYS[0], b"2", 6)
    assert flush(table, parent=4) == {KEYS[0]: b"1"}
    assert table.get(KEYS[0]) == b"2"
    assert flush(table, parent=6) == {KEYS[0]: b"2", KEYS[1]: b"1"}


def test_a_commit_of_offsets_by_key_takes_along_what_the_offset_of_each_key_covers() -> None:
    table = owning()
    lower, upper = interval(0, 2, 1), interval(1, 2, 1)
    for key in (LOWER[0], UPPER[0]):
        table.put(key, b"1", 3)
        table.put(key, b"2", 7)
    wrote = [(write.key, write.value) for some in table.writes({PARENT: [(*lower, 5), (*upper, 7)]}) for write in some]
    list(table.flushed())
    assert sorted(wrote) == sorted([(LOWER[0], b"1"), (UPPER[0], b"2")])
    assert [write for some in table.writes({PARENT: [(*upper, 9)]}) for write in some] == []
    table.not_flushed()
    assert flush(table, parent=7) == {LOWER[0]: b"2"}


def test_what_is_put_during_a_flush_is_kept_for_the_next() -> None:
    table = owning()
    table.put(KEYS[0], b"1", 3)
    assert [write.value for writes in table.writes({PARENT: 3}) for write in writes] == [b"1"]
    table.put(KEYS[0], b"2", 3)
    table.undo(PARENT, KEYS[0], 3)
    table.put(KEYS[0], b"3", 3)
    list(table.flushed())
    assert table.get(KEYS[0]) == b"3"
    assert flush(table, parent=3) == {KEYS[0]: b"3"}


def test_a_flush_that_failed_is_repeated_with_later_changes() -> None:
    table = owning()
    table.put(KEYS[0], b"1", 3)
    list(table.writes({PARENT: 3}))
    table.not_flushed()
    table.put(KEYS[0], b"2", 4)
    assert flush(table, parent=4) == {KEYS[0]: b"2"}


def test_keys_released_during_a_flush_stay_released() -> None:
    table = owning()
    table.put(KEYS[0], b"1", 3)
    list(table.writes({PARENT: 3}))
    table.release([PARENT])
    table.admit(ONE, PARENT, 3, 5)
    load(table, {KEYS[0]: b"other"})
    list(table.flushed())
    assert table.get(KEYS[0]) == b"other"


def test_the_change_of_a_record_that_failed_is_undone() -> None:
    table = owning({KEYS[0]: b"1"})
    table.put(KEYS[0], b"2", 3)
    table.put(KEYS[0], b"3", 4)
    table.undo(PARENT, KEYS[0], 4)
    table.undo(PARENT, KEYS[1], 4)
    assert table.get(KEYS[0]) == b"2"
    table.undo(PARENT, KEYS[0], 3)
    assert (table.get(KEYS[0]), table.unflushed()) == (b"1", set())


def test_changes_of_keys_that_were_left_behind_are_still_flushed() -> None:
    table = owning(lineage=GROWN)
    table.put(UPPER[0], b"1", 10)
    table.advance(GROWN, {PARENT: 10})
    assert flush(table, parent=10) == {UPPER[0]: b"1"}
    assert table.entries == 0


def test_a_flush_comes_in_slices() -> None:
    table = owning()
    many = [b"many-%d" % number for number in range(1_200)]
    for key in many:
        table.put(key, b"1", 1)
    slices = list(table.writes({PARENT: 1}))
    assert [len(writes) for writes in slices] == [500, 500, 200]
    assert len(list(table.flushed())) == 2
    assert table.entries == len(many)


def test_intervals_without_others() -> None:
    def gaps(wanted: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [tuple(one) for one in without([Interval(*one) for one in wanted], [Interval(*one) for one in taken])]

    assert gaps([(0, 9)], []) == [(0, 9)]
    assert gaps([(0, 9)], [(0, 9)]) == []
    assert gaps([(0, 9)], [(3, 4), (8, 20)]) == [(0, 2), (5, 7)]
    assert gaps([(5, 9), (0, 6)], [(2, 2)]) == [(0, 1), (3, 9)]
    assert gaps([(0, 3), (10, 12)], [(3, 10)]) == [(0, 2), (11, 12)]
