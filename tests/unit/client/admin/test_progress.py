"""The gaps of a group's progress, and the members that own them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client import Gap, MemberDescription, OffsetAndMetadata
from anabranch.client.admin.groups import GroupAdmin
from anabranch.client.admin.progress import gaps_of, owners_of, sorted_by_keys
from anabranch.client.admin.slices import HeldSlices
from anabranch.machines.key_ranges import WHOLE, Ranges
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts

LOW, UP = cuts(SPACE, 2)
TP = TopicPartition("t", 0)


def member(name: str, keys: Ranges = ()) -> MemberDescription:
    held = frozenset({TP})
    ranges = {TP: keys} if keys else {}
    return MemberDescription(name, None, name, "/host", 1, ("t",), None, held, held, "consumer", ranges)


@pytest.mark.parametrize(
    ("keys", "owners"),
    [
        ({"first": (LOW,), "second": (UP,)}, [("second",), ("second",), ("first", "second")]),
        ({"first": (UP,), "second": (LOW,)}, [("first",), ("first",), ("first", "second")]),
        ({"alone": WHOLE}, [("alone",), ("alone",), ("alone",)]),
        ({"both": (Interval(0, 9), Interval(SPACE_END, SPACE_END))}, [("both",), ("both",), ("both",)]),
        ({"first": (LOW,)}, [(), (), ("first",)]),
        ({}, [(), (), ()]),
    ],
)
def test_a_gap_is_of_the_members_with_keys_whose_offset_is_not_above_its_end(
    keys: dict[str, Ranges], owners: list[tuple[str, ...]]
) -> None:
    """The lower keys are done below 100, the upper ones below 43."""
    ranges = [(45, 47), (60, 99), (101, 102)]
    at = OffsetAndMetadata(43, ranges=ranges, shares=[(*LOW, 100), (*UP, 43)])
    bounds = [(43, 44), (48, 59), (100, 100)]
    assert gaps_of(at, keys) == tuple(Gap(*gap, of) for gap, of in zip(bounds, owners, strict=True))


def test_without_shares_a_gap_is_of_all_sharers_and_without_ranges_there_is_none() -> None:
    keys = {"first": (LOW,), "second": (UP,)}
    assert gaps_of(OffsetAndMetadata(43, ranges=[(45, 47)]), keys) == (Gap(43, 44, ("first", "second")),)
    assert gaps_of(OffsetAndMetadata(43, shares=[(*LOW, 100), (*UP, 43)]), keys) == ()


def test_members_are_found_by_their_keys_in_the_order_of_keys() -> None:
    members = sorted_by_keys([member("b", (UP,)), member("a", (LOW,))], TP)
    assert [it.member_id for it in members] == ["a", "b"]
    assert [owners_of(keys, TP, members) for keys in (LOW, UP, SPACE)] == [["a"], ["b"], ["a", "b"]]
    assert sorted_by_keys(members, TopicPartition("t", 1)) == []


class Group(GroupAdmin):
    """An admin client of a group whose offsets and members are known, or that is deleted meanwhile."""

    _api_timeout_ms = 1_000

    def __init__(self, at: OffsetAndMetadata, members: tuple[MemberDescription, ...] | ApiError) -> None:
        self._at = at
        self._found = members
        self.described = 0
        self.slices: dict[TopicPartition, list[HeldSlices]] = {}

    def _offsets(self, group: str) -> Any:
        return self

    async def fetch(self, *args: Any, **named: Any) -> dict[TopicPartition, OffsetAndMetadata]:
        return {TP: self._at}

    async def describe_slices(
        self, group_id: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, list[HeldSlices]]:
        assert list(partitions) == [TP]
        return self.slices

    async def _describe_group(self, name: str) -> Any:
        self.described += 1
        if isinstance(self._found, ApiError):
            raise self._found
        return type("Described", (), {"members": self._found})


def test_offsets_are_listed_with_gaps_and_the_group_is_described_only_for_them() -> None:
    members = (member("second", (UP,)), member("first", (LOW,)))
    plain = Group(OffsetAndMetadata(43), members)
    assert asyncio.run(plain.list_group_offsets("g")) == {TP: OffsetAndMetadata(43)}
    assert plain.described == 0
    at = OffsetAndMetadata(43, ranges=[(45, 47)])
    found = asyncio.run(Group(at, members).list_group_offsets("g"))
    assert found == {TP: at._replace(gaps=(Gap(43, 44, ("first", "second")),))}


def test_a_gap_is_with_the_members_that_hold_its_slices_whatever_is_assigned() -> None:
    at = OffsetAndMetadata(10, ranges=[(20, 29), (40, 49), (70, 79)])
    group = Group(at, (member("assigned", (LOW, UP)),))
    group.slices = {TP: [HeldSlices("one", 1, 5, 10, 14), HeldSlices("two", 2, 20, 15, 59)]}
    gaps = asyncio.run(group.list_group_offsets("g"))[TP].gaps
    assert gaps == (Gap(10, 19, ("one", "two")), Gap(30, 39, ("two",)), Gap(50, 69, ("two",)))
    group.slices = {TP: [HeldSlices("two", 1, 5, 30, 34)]}
    gaps = asyncio.run(group.list_group_offsets("g"))[TP].gaps
    assert [gap.owners for gap in gaps] == [(), ("two",), ()], "nobody has claimed the others yet"


def test_a_group_that_is_deleted_meanwhile_has_gaps_without_owners_and_other_errors_are_raised() -> None:
    at = OffsetAndMetadata(43, ranges=[(45, 47)])
    gone = Group(at, ApiError(ErrorCode.GROUP_ID_NOT_FOUND, "there is no group"))
    assert asyncio.run(gone.list_group_offsets("g"))[TP].gaps == (Gap(43, 44),)
    refused = Group(at, ApiError(ErrorCode.GROUP_AUTHORIZATION_FAILED, "no"))
    with pytest.raises(ApiError, match="no"):
        asyncio.run(refused.list_group_offsets("g"))
