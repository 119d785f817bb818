"""What leaders of slices are told of a group's progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.machines.groups.individual import OffsetRanges
from anabranch.machines.groups.positions import Position
from anabranch.machines.groups.taken import JOINED_AT_A_TIME
from anabranch.machines.partition.slices import Claimant, Slice, Slices, SliceSettings
from anabranch.server.coordinators.groups import Groups
from anabranch.server.coordinators.progress import Committed, Memberships
from tests.support.ranged_group import RangedGroup, keys

TOPIC = UUID(int=1)


class Machine:
    """A loaded machine that has one position, as far as it is asked for it."""

    def __init__(self, position: Position) -> None:
        self.settings = SimpleNamespace(individual_commits=True)
        self.groups: dict[str, Any] = {}
        individual = SimpleNamespace(of=lambda *_: OffsetRanges())
        self.offsets = SimpleNamespace(
            current=lambda *_: position, individual=individual, may_be_taken=lambda *_: False
        )


def committed(machine: Machine, log_start: int = 0, memberships: Memberships | None = None) -> Committed:
    groups = SimpleNamespace(shard_of=lambda group_id: SimpleNamespace(machine=machine))
    asked = memberships or Memberships(cast(Groups, groups))
    asked._groups = cast(Groups, groups)
    found = asked.committed("g", "t", TOPIC, 0, log_start)
    assert found is not None
    return found


@pytest.mark.parametrize(("is_begun", "stable"), [(False, 50), (True, 3)])
def test_what_the_coordinator_wrote_is_the_log_start_at_least_and_what_a_client_committed_is_not(
    is_begun: bool, stable: int
) -> None:
    found = committed(Machine(Position(3, is_begun=is_begun)), log_start=50)
    assert (found.stable, found.reaches(0)) == (stable, stable)
    assert committed(Machine(Position(70, is_begun=is_begun)), log_start=50).stable == 70


def test_a_machine_that_was_loaded_again_has_another_version_whatever_became_of_the_one_before() -> None:
    asked = Memberships(cast(Groups, None))
    versions = set()
    for _ in range(50):  # Each one may lie where the last one lay.
        machine = Machine(Position(3))
        first, second = committed(machine, memberships=asked), committed(machine, memberships=asked)
        assert first.version == second.version
        versions.add(first.version)
        del machine
    assert len(versions) == 50


class Claims:
    """Members that claim slices of a group that commits in transactions."""

    def __init__(self, group: RangedGroup, limit: int = 20) -> None:
        self.group = group
        self.memberships = Memberships(cast(Groups, SimpleNamespace(shard_of=lambda group_id: self)))
        self.slices = Slices(SliceSettings())
        self.live = {"M", "N"}
        self.limit = limit
        self.sequences = dict.fromkeys(self.live, 0)

    @property
    def machine(self) -> Any:
        return self.group.coordinator

    def progress(self) -> Committed:
        found = self.memberships.committed("g", "foo", TOPIC, 0, 0)
        assert found is not None
        return found

    def claim(self, member: str) -> tuple[int, int] | None:
        by = Claimant(member, 1, 1, self.sequences[member])
        found = self.slices.claim(by, self.progress(), self.limit, 5, self.live.__contains__, 0)
        if found is None:
            return None
        assert isinstance(found, Slice)
        self.sequences[member] += 1
        return found.start, found.end


@pytest.fixture
def claims() -> Claims:
    group = RangedGroup(gaps_are_waited_for=True)
    group.committed(5)
    return Claims(group)


def test_what_is_in_a_transaction_is_offered_to_nobody_until_that_has_ended(claims: Claims) -> None:
    assert claims.claim("M") == (5, 9)
    assert claims.group.commit_later(1, ranges=[(5, 9)]).error_code == 0
    claims.live.discard("M")
    assert claims.claim("N") == (10, 14), "not what the one that is gone has in a transaction"
    claims.group.end(1, committed=True, durable=False)
    assert [claims.claim("N"), claims.claim("N")] == [(15, 19), None], "nor while it is being folded"
    claims.group.settle()
    assert claims.claim("N") is None and claims.progress().stable == 10


def test_what_is_aborted_is_offered_again(claims: Claims) -> None:
    assert claims.claim("M") == (5, 9)
    claims.group.commit_later(1, ranges=[(5, 7)])
    claims.live.discard("M")
    assert claims.claim("N") == (8, 12), "behind what is in the transaction"
    claims.group.end(1, committed=False)
    assert claims.claim("N") == (5, 7)


def test_an_offset_in_a_transaction_takes_what_lies_below(claims: Claims) -> None:
    claims.group.commit_later(1, offset=12)
    assert claims.claim("N") == (12, 16)
    claims.group.end(1, committed=False)
    assert claims.claim("N") == (5, 9)


def test_all_keys_in_a_transaction_take_what_lies_below(claims: Claims) -> None:
    claims.group.commit_later(1, shares=[keys(0, 3, 12), keys(3, 7, 13)])
    assert claims.progress().passes(5) in (5, 12), "where all keys are named, up to the lowest"


def test_what_waits_to_be_part_of_a_transaction_is_offered_to_nobody(claims: Claims) -> None:
    assert [claims.claim("M"), claims.claim("M")] == [(5, 9), (10, 14)]
    waits = claims.group.commit_later(1, ranges=[(10, 14)])
    claims.slices.end_session("M")
    claims.sequences["M"] = 0
    assert claims.claim("N") == (5, 9)
    assert claims.claim("N") == (15, 19), "though nobody holds what lies before"
    assert claims.group.commit_later(2, ranges=[(5, 9)]).error_code == 0
    assert claims.group.code_of(waits) == 0, "as the gap is closed"
    assert claims.claim("N") is None
    claims.group.end(2, committed=True)
    claims.group.end(1, committed=False)
    assert claims.claim("N") == (10, 14)


def test_what_waits_and_is_refused_is_offered_again(claims: Claims) -> None:
    assert [claims.claim("M"), claims.claim("M")] == [(5, 9), (10, 14)]
    waits = claims.group.commit_later(1, ranges=[(10, 14)])
    claims.slices.end_session("M")
    assert [claims.claim("N"), claims.claim("N"), claims.claim("N")] == [(5, 9), (15, 19), None]
    claims.group.end(1, committed=False)
    assert claims.group.code_of(waits), "its transaction has ended"
    assert claims.claim("N") == (10, 14)


def test_what_a_transaction_had_is_offered_again_after_a_reset(claims: Claims) -> None:
    claims.group.commit_later(1, ranges=[(5, 9)])
    assert claims.claim("N") == (10, 14)
    claims.group.end(1, committed=True)
    claims.group.settle()
    assert claims.progress().stable == 10
    claims.group.committed(3)
    assert claims.claim("M") == (3, 7)


def test_what_transactions_hold_is_joined_some_at_a_time(claims: Claims) -> None:
    claims.limit = 10_000
    many = [(5, 5), *((offset, offset) for offset in range(7, 7 + 6 * JOINED_AT_A_TIME, 2))]
    claims.group.commit_later(1, ranges=[(6, 6)])
    for at in range(0, len(many), 100):
        claims.group.commit_later(2, ranges=many[at : at + 100])
    looks = 1
    while not claims.progress().is_known:
        looks += 1
    assert looks > 2
    assert claims.progress().passes(5) == 8


def test_commits_and_ends_of_transactions_have_what_is_open_looked_for_no_second_time(claims: Claims) -> None:
    versions = []
    for number in range(3):
        first = 5 + 5 * number
        assert claims.claim("M") == (first, first + 4)
        claims.group.commit_later(1, ranges=[(first, first + 4)])
        versions.append(claims.progress().version)
        claims.group.end(1, committed=True)
        claims.group.settle()
        versions.append(claims.progress().version)
    assert len(set(versions)) == 1
