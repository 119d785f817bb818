"""What the harness makes of what a member says."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.conformance.members.group import MOMENT_NS, Kind, Member, check_owners
from tests.conformance.members.process import Worker

ME = [["t", 0]]
END = [["t", 0, 2]]


def member(*said: tuple[str, dict[str, Any]]) -> Member:
    """A member that was handed two records, and what it said then."""
    one = Member("m", Kind("aio", "classic"), cast(Worker, None))
    records = [["t", 0, 0, "a"], ["t", 0, 1, "b"]]
    begun = [("owns", {"partitions": ME}), ("records", {"records": records})]
    for at, (event, more) in enumerate([*begun, *said], 1):
        one.hear({"event": event, "at": at, **more})
    return one


def test_what_was_being_committed_when_its_partition_was_taken_is_committed_if_the_coordinator_took_it() -> None:
    gone = ("owns", {"partitions": []})
    here = ("owns", {"partitions": ME})
    assert member(("committing", {"offsets": END}), gone, here, ("committed", {"offsets": END})).done == {0, 1}


def test_what_was_not_yet_being_committed_is_not() -> None:
    gone = ("owns", {"partitions": []})
    here = ("owns", {"partitions": ME})
    assert not member(gone, here, ("committing", {"offsets": END}), ("committed", {"offsets": END})).done


def test_what_was_refused_and_taken_is_not() -> None:
    refused = ("refused", {"why": "", "again": True})
    gone, here = ("owns", {"partitions": []}), ("owns", {"partitions": ME})
    said = [("committing", {"offsets": END}), gone, refused, here, ("committed", {"offsets": END})]
    assert not member(*said).done
    assert member(*said[:1], refused, ("committed", {"offsets": END})).done == {0, 1}


def test_what_was_being_committed_by_a_member_that_died_may_be_committed() -> None:
    dead = member(("committing", {"offsets": END}))
    assert not dead.may_have_done
    dead.is_gone = True
    assert dead.may_have_done == {0, 1}
    assert not dead.done
    left = member(("committing", {"offsets": [["t", 0, 1]]}), ("committed", {"offsets": [["t", 0, 1]]}), ("left", {}))
    assert left.may_have_done == {0}


def owner(since: int, until: int, *, is_hasty: bool) -> Member:
    """A member that owned a partition in that time, and was handed a record of it in the middle."""
    one = Member("m", Kind("java", "consumer", is_hasty=is_hasty), cast(Worker, None))
    one.hear({"event": "owns", "at": since, "partitions": ME})
    one.hear({"event": "records", "at": (since + until) // 2, "records": [["t", 0, 0, "a"]]})
    one.hear({"event": "owns", "at": until, "partitions": []})
    return one


def test_a_hasty_member_may_use_a_partition_of_another_one_for_a_moment() -> None:
    """A Java consumer that has just joined reports to own nothing while it takes its partitions."""
    check_owners(
        [owner(1, 4 * MOMENT_NS, is_hasty=True), owner(4 * MOMENT_NS - 40_000_000, 9 * MOMENT_NS, is_hasty=True)]
    )


@pytest.mark.parametrize(("is_hasty", "together_ns"), [(False, 40_000_000), (True, 2 * MOMENT_NS)])
def test_two_owners_at_a_time_are_noticed(is_hasty: bool, together_ns: int) -> None:
    first = owner(1, 4 * MOMENT_NS, is_hasty=is_hasty)
    with pytest.raises(AssertionError, match="both owned"):
        check_owners([first, owner(4 * MOMENT_NS - together_ns, 5 * MOMENT_NS, is_hasty=is_hasty)])
