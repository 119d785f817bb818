"""The edge finds every kind of broken history, and lets through what the promise allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.application_edge import ApplicationEdge, Handed, OrderError

P0, P1, P2 = ("t", 0), ("t", 1), ("t", 2)


def handed(number: int, partition: tuple[str, int] = P0, offset: int | None = None, key: str = "k") -> Handed:
    return Handed("p", key, number, partition, number if offset is None else offset)


def begun(**given: object) -> ApplicationEdge:
    """An edge whose member m was handed #0 and #1 of partition 0."""
    edge = ApplicationEdge(**given)  # type: ignore[arg-type]
    edge.assigned("m", [P0, P1])
    for number in range(2):
        edge.delivered("m", handed(number))
    return edge


def out_of_order(edge: ApplicationEdge) -> None:
    edge.delivered("m", handed(3))
    edge.delivered("m", handed(2))


def first_one_left_out(edge: ApplicationEdge) -> None:
    edge.delivered("m", handed(1, key="another"))


def moved_without_a_commit(edge: ApplicationEdge) -> None:
    edge.delivered("m", handed(2, P1, 0))


def moved_to_another_member_without_a_commit(edge: ApplicationEdge) -> None:
    edge.revoked("m", [P1])
    edge.assigned("n", [P1])
    edge.delivered("n", handed(2, P1, 0))


def moved_after_a_commit_that_is_too_low(edge: ApplicationEdge) -> None:
    edge.committed({P0: 1})
    edge.delivered("m", handed(2, P1, 0))


def moved_after_a_commit_that_was_refused(edge: ApplicationEdge) -> None:
    edge.committing({P0: 2})
    edge.refused({P0: 2})
    edge.delivered("m", handed(2, P1, 0))


def moved_after_a_commit_of_another_partition(edge: ApplicationEdge) -> None:
    edge.committed({("t", 2): 9, ("u", 0): 9})
    edge.delivered("m", handed(2, P1, 0))


def committed_and_handed_to_the_next_owner(edge: ApplicationEdge) -> None:
    edge.committed({P0: 2})
    edge.gone("m")
    edge.assigned("n", [P0])
    edge.delivered("n", handed(1))


def given_to_two_members(edge: ApplicationEdge) -> None:
    edge.revoked("m", [P1])
    edge.assigned("n", [P1])
    edge.assigned("n", [P0])


def appended_twice(edge: ApplicationEdge) -> None:
    edge.delivered("m", handed(1, P0, 7))


def appended_twice_in_two_partitions(edge: ApplicationEdge) -> None:
    edge.committed({P0: 2})
    edge.delivered("m", handed(2, P1, 0))
    edge.delivered("m", handed(1, P1, 1))


@pytest.mark.parametrize(
    "history",
    [
        out_of_order,
        first_one_left_out,
        moved_without_a_commit,
        moved_to_another_member_without_a_commit,
        moved_after_a_commit_that_is_too_low,
        moved_after_a_commit_that_was_refused,
        moved_after_a_commit_of_another_partition,
        committed_and_handed_to_the_next_owner,
        given_to_two_members,
        appended_twice,
        appended_twice_in_two_partitions,
    ],
)
def test_a_broken_history_is_found(history: Callable[[ApplicationEdge], None]) -> None:
    edge = begun()
    with pytest.raises(OrderError):
        history(edge)


def test_a_record_may_move_when_its_predecessor_is_committed_or_may_be() -> None:
    for tell in (ApplicationEdge.committed, ApplicationEdge.committing):
        edge = begun()
        tell(edge, {P0: 2})
        edge.delivered("m", handed(2, P1, 0))
        assert (edge.moves, edge.first_deliveries, edge.by_partition[P1]) == (1, 3, 1)


def test_an_uncommitted_record_may_come_again_to_the_next_owner() -> None:
    edge = begun()
    edge.committed({P0: 1})
    edge.gone("m")
    edge.assigned("n", [P0])
    edge.delivered("n", handed(1))
    assert edge.repetitions == 1
    with pytest.raises(OrderError):
        edge.delivered("n", handed(0))


def test_what_is_committed_while_a_member_owns_the_partition_may_still_come_to_it() -> None:
    edge = begun()
    edge.gone("m")
    edge.assigned("n", [P0])
    edge.committed({P0: 2})
    edge.delivered("n", handed(0))
    assert edge.repetitions == 1


def test_only_deleted_records_may_be_left_out() -> None:
    deleted = {(P0, 2)}
    places = {("p", "k"): {2: (P0, 2), 3: (P0, 3)}}
    edge = begun(
        deleted=lambda partition, offset: (partition, offset) in deleted,
        place_of=lambda stream, number: places[stream].get(number),
    )
    edge.delivered("m", handed(3))
    assert edge.skipped == 1
    edge = begun(deleted=lambda partition, offset: False, place_of=lambda stream, number: places[stream].get(number))
    with pytest.raises(OrderError, match="left out"):
        edge.delivered("m", handed(3))


def test_a_deleted_predecessor_needs_no_commit() -> None:
    edge = begun(deleted=lambda partition, offset: partition == P0)
    edge.delivered("m", handed(2, P1, 0))
    assert edge.moves == 1


def test_a_gate_may_open_by_time_only_after_the_patience_without_progress() -> None:
    for committed_ms, allowed in ((0, True), (600, False)):
        edge = begun(patience_ms=1_000)
        edge.committed({P0: 1}, committed_ms)
        if allowed:
            edge.delivered("m", handed(2, P1, 0), 1_100)
            continue
        with pytest.raises(OrderError):
            edge.delivered("m", handed(2, P1, 0), 1_100)


def test_the_patience_begins_when_a_member_is_given_the_partition() -> None:
    """The first record may come half a second later, as the fetch that was open then does not ask for it."""
    for assigned_ms, allowed in ((0, True), (600, False)):
        edge = ApplicationEdge(patience_ms=1_000)
        edge.assigned("m", [P0], assigned_ms)
        edge.delivered("m", handed(0), assigned_ms + 500)
        if allowed:
            edge.delivered("m", handed(1, P1, 0), 1_100)
            continue
        with pytest.raises(OrderError):
            edge.delivered("m", handed(1, P1, 0), 1_100)


@pytest.mark.parametrize(
    ("resizes", "allowed"),
    [
        ([(0, 1), (500, 2)], True),
        ([(0, 1), (1_300, 2)], False),
        ([(0, 1), (500, 3), (1_300, 2)], True),
        ([(0, 2)], False),
    ],
)
def test_a_gate_that_opened_by_time_stays_open_and_later_ones_wait_again(
    resizes: list[tuple[int, int]], allowed: bool
) -> None:
    """The position of P0 stands still from 0 to 1,200 ms."""
    edge = begun(patience_ms=1_000, resizes=resizes)
    edge.committed({P0: 1}, 0)
    edge.committed({P0: 0}, 1_200)
    if allowed:
        edge.delivered("m", handed(2, P1, 0), 1_500)
        return
    with pytest.raises(OrderError):
        edge.delivered("m", handed(2, P1, 0), 1_500)


def test_a_group_that_reads_from_the_end_begins_anywhere_and_then_misses_nothing() -> None:
    edge = ApplicationEdge(begins_late=True)
    edge.delivered("m", handed(5))
    edge.delivered("m", handed(6))
    with pytest.raises(OrderError, match="left out"):
        edge.delivered("m", handed(8))


def test_records_that_were_never_handed_out_are_missing() -> None:
    edge = begun()
    edge.check_complete({("p", "k"): 2})
    with pytest.raises(OrderError, match="never handed out"):
        edge.check_complete({("p", "k"): 3})
    with pytest.raises(OrderError, match="never handed out"):
        edge.check_complete({("p", "k"): 2, ("p", "another"): 1})
    assert edge.missing({("p", "k"): 4}) == {("p", "k"): [2, 3]}


# -- members without order -------------------------------------------------------------------------------------------


def shared_with_free() -> ApplicationEdge:
    """An edge whose member m owns partition 0 and was handed #0 and #1 of it; `free` owns partition 1."""
    edge = ApplicationEdge(keeps_order=lambda member: member != "free")
    edge.assigned("m", [P0, P2])
    edge.assigned("free", [P1])
    for number in range(2):
        edge.delivered("m", handed(number))
    return edge


def test_a_member_without_order_may_read_on_and_what_it_left_behind_still_comes() -> None:
    edge = shared_with_free()
    edge.delivered("free", handed(4, P1, 0))
    edge.delivered("free", handed(4, P1, 0))
    for number in (2, 3):
        edge.delivered("m", handed(number))
    assert (edge.first_deliveries, edge.repetitions) == (5, 1)
    assert edge.missing({("p", "k"): 6}) == {("p", "k"): [5]}


@pytest.mark.parametrize("committed", [{P0: 2}, {P1: 1}, {P0: 2, P1: 1}])
def test_a_member_with_order_waits_for_what_one_without_order_was_handed(committed: dict[tuple[str, int], int]) -> None:
    edge = shared_with_free()
    edge.delivered("free", handed(2, P1, 0))
    edge.committed(committed)
    if len(committed) == 2:
        edge.delivered("m", handed(3, P2, 0))
        assert edge.moves == 1
    else:
        with pytest.raises(OrderError, match="before what precedes it was committed"):
            edge.delivered("m", handed(3, P2, 0))


def test_a_member_with_order_leaves_nothing_out_that_one_without_order_has_overtaken() -> None:
    edge = shared_with_free()
    edge.committed({P0: 2, P1: 1})
    edge.delivered("free", handed(3, P1, 0))
    with pytest.raises(OrderError, match="#2 at None is left out"):
        edge.delivered("m", handed(4, P2, 0))


def test_what_was_overtaken_in_a_partition_that_changes_hands_still_has_to_come() -> None:
    """The gate in front of it was passed by a member without order; what waits elsewhere is late, and not lost."""
    edge = shared_with_free()
    edge.delivered("free", handed(3, P1, 0))
    edge.committed({P1: 1})
    edge.revoked("free", [P1])
    edge.assigned("m", [P1])
    edge.delivered("m", handed(4, P1, 1))
    assert edge.missing({("p", "k"): 5}) == {("p", "k"): [2]}
    edge.delivered("m", handed(2))
    assert not edge.missing({("p", "k"): 5})
    assert edge.first_deliveries == 5


def test_what_a_member_without_order_was_handed_and_did_not_commit_may_come_again() -> None:
    edge = shared_with_free()
    edge.committed({P0: 2})
    edge.delivered("free", handed(2, P1, 0))
    edge.gone("free")
    edge.assigned("m", [P1])
    edge.delivered("m", handed(2, P1, 0))
    assert (edge.first_deliveries, edge.repetitions) == (3, 1)
    edge.delivered("m", handed(3, P1, 1))


def test_what_a_member_without_order_committed_does_not_come_again() -> None:
    edge = shared_with_free()
    edge.committed({P0: 2})
    edge.delivered("free", handed(2, P1, 0))
    edge.committed({P1: 1})
    edge.gone("free")
    edge.assigned("m", [P1])
    with pytest.raises(OrderError, match="1 was committed before it began there"):
        edge.delivered("m", handed(2, P1, 0))
