"""What the harness makes of what a member says."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import pytest

from tests.conformance.members.group import Kind, Member, check_deliveries, check_owners
from tests.conformance.members.process import Worker
from tests.conformance.members.worker import At
from tests.support.heartbeat_tap import Beat, HeartbeatTap

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


def owner(name: str, since: int, until: int, *, is_hasty: bool = True) -> Member:
    """A member that owned a partition in that time, and was handed a record of it in the middle."""
    one = Member(name, Kind("java", "consumer", is_hasty=is_hasty), cast(Worker, None))
    one.hear({"event": "owns", "at": since, "partitions": ME})
    one.hear({"event": "records", "at": (since + until) // 2, "records": [["t", 0, 0, "a"]]})
    one.hear({"event": "owns", "at": until, "partitions": []})
    return one


@pytest.mark.parametrize("is_hasty", [False, True])
def test_two_owners_at_a_time_are_noticed(is_hasty: bool) -> None:
    with pytest.raises(AssertionError, match="both owned"):
        check_owners([owner("a", 10, 400, is_hasty=is_hasty), owner("b", 390, 500, is_hasty=is_hasty)])


MINE, NOTHING = frozenset({("t", 0)}), frozenset[At]()


class Noted(HeartbeatTap):
    """What a tap has noted, without a wire."""

    def __init__(self, **beats: list[Beat]) -> None:
        self.beats = defaultdict(list, beats)


def test_a_member_may_tell_its_user_that_it_owns_what_it_has_disowned() -> None:
    """A Java consumer that knows no names yet acknowledges to own nothing, after it took what it knows by then."""
    given = [Beat(320, NOTHING, True), Beat(360, MINE, True), Beat(370, MINE, True), Beat(380, None, True)]
    said = [Beat(100, MINE, False), Beat(350, NOTHING, False), Beat(355, None, False), Beat(410, MINE, False)]
    check_owners([owner("a", 340, 450), owner("b", 390, 500)], Noted(a=said, b=given))
    check_owners([owner("b", 390, 500), owner("a", 340, 450)], Noted(a=said, b=given))


@pytest.mark.parametrize(
    "said",
    [
        [],
        [Beat(100, MINE, False)],
        [Beat(100, MINE, False), Beat(355, None, False)],
        [Beat(100, NOTHING, False), Beat(350, MINE, False)],
        [Beat(100, MINE, False), Beat(365, NOTHING, False)],
        [Beat(100, MINE, False), Beat(350, NOTHING, True)],
    ],
)
def test_a_member_that_was_given_what_another_one_had_not_disowned_is_noticed(said: list[Beat]) -> None:
    given = [Beat(320, NOTHING, True), Beat(360, MINE, True), Beat(370, MINE, True)]
    with pytest.raises(AssertionError, match="both owned"):
        check_owners([owner("a", 340, 450), owner("b", 390, 500)], Noted(a=said, b=given))


def test_a_member_that_is_given_again_what_it_had_disowned_is_noticed_beside_the_owner() -> None:
    """Every member says first that it owns nothing: that excuses no coordinator that gives it what is another's."""
    given = [Beat(320, NOTHING, True), Beat(360, MINE, True)]
    said = [Beat(100, NOTHING, False), Beat(380, MINE, True)]
    with pytest.raises(AssertionError, match="both owned"):
        check_owners([owner("a", 385, 450), owner("b", 370, 500)], Noted(a=said, b=given))
    check_owners([owner("a", 385, 450), owner("b", 370, 500)], Noted(a=said[:1], b=given))


def reader(name: str, since: int, until: int, *commits: tuple[int, int, int], is_exact: bool = True) -> Member:
    """A member that owned a partition in that time, and committed each (from, to, when), which took 10 ns."""
    one = Member(name, Kind("java", "consumer", is_hasty=True, is_exact=is_exact), cast(Worker, None))
    one.hear({"event": "owns", "at": since, "partitions": ME})
    for first, end, at in commits:
        one.hear({"event": "records", "at": at - 10, "records": [["t", 0, it, str(it)] for it in range(first, end)]})
        one.hear({"event": "committing", "at": at - 9, "offsets": [["t", 0, end]]})
        one.hear({"event": "committed", "at": at, "offsets": [["t", 0, end]]})
    one.hear({"event": "owns", "at": until, "partitions": []})
    return one


GIVEN_TO_B = [Beat(320, NOTHING, True), Beat(360, MINE, True)]
DISOWNED_BY_A = [Beat(300, MINE, True), Beat(350, NOTHING, False), Beat(410, MINE, False)]
NOTED = Noted(a=DISOWNED_BY_A, b=GIVEN_TO_B)


def test_a_record_that_two_members_have_committed_one_after_the_other_is_noticed() -> None:
    one, other = reader("a", 100, 200, (0, 5, 150)), reader("b", 370, 500, (4, 6, 430))
    with pytest.raises(AssertionError, match="@ 4 was committed by"):
        check_deliveries([one, other], NOTED)
    with pytest.raises(AssertionError, match="@ 4 was committed by"):
        check_deliveries([one, other])
    check_deliveries([one, reader("b", 370, 500, (5, 6, 430))], NOTED)
    check_deliveries([one, reader("b", 370, 500, (4, 6, 430), is_exact=False)], NOTED)


def test_what_a_member_reads_that_it_had_disowned_may_be_read_by_the_owner_as_well() -> None:
    """Two Java consumers join together: one takes the whole assignment that it was given first, after it said `[]`."""
    one, other = reader("a", 395, 450, (0, 5, 440)), reader("b", 390, 500, (0, 5, 430))
    for members in ([one, other], [other, one]):
        check_deliveries(members, NOTED)
        with pytest.raises(AssertionError, match="@ 0 was committed by"):
            check_deliveries(members)


@pytest.mark.parametrize(
    ("said_by_a", "commit"),
    [
        (DISOWNED_BY_A[:1], 440),  # it disowned nothing
        ([*DISOWNED_BY_A[:1], Beat(365, NOTHING, False)], 440),  # only when the other one had the partition already
        ([*DISOWNED_BY_A[:2], Beat(355, MINE, True)], 440),  # and was given it again
        (DISOWNED_BY_A, 358),  # had committed before the other one was given the partition
    ],
)
def test_it_is_noticed_that_the_owner_reads_again_what_was_committed_before(said_by_a: list[Beat], commit: int) -> None:
    one, other = reader("a", 345, 450, (0, 5, commit)), reader("b", 390, 500, (0, 5, 430))
    with pytest.raises(AssertionError, match="@ 0 was committed by"):
        check_deliveries([one, other], Noted(a=said_by_a, b=GIVEN_TO_B))


@pytest.mark.parametrize(("stray_to", "stray_at", "is_excused"), [(5, 460, True), (5, 420, False), (6, 460, False)])
def test_the_owners_commit_may_be_set_back_by_one_of_who_had_disowned_the_partition(
    stray_to: int, stray_at: int, is_excused: bool
) -> None:
    """But not if that is done before the owner commits, and no further than it reaches."""
    one = reader("a", 395, 480, (0, stray_to, stray_at))
    members = [one, reader("b", 390, 500, (0, 7, 440)), reader("c", 600, 700, (5, 8, 650))]
    if is_excused:
        check_deliveries(members, NOTED)
    else:
        with pytest.raises(AssertionError, match=r"was committed by <b .* and by <c "):
            check_deliveries(members, NOTED)
