"""What members hold never passes its bound, and is not counted more often than need be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from anabranch.machines.groups.consumer.group import Assignor, Classic, ConsumerGroup, Member, MemberMetadata
from anabranch.server.coordinators.member_metadata import (
    ASSIGNED_SIZE,
    COUNT_INTERVAL_S,
    COUNTED_PER_STEP,
    GROUP_SIZE,
    MEMBER_SIZE,
    SMALL_SIZE,
    MetadataAdmission,
    held_by,
)


def test_members_of_groups_of_the_consumer_protocol_are_counted() -> None:
    """Of either protocol: names of topics, metadata of assignors, and what a classic member said of its strategies."""
    group = ConsumerGroup("g")
    assignor = Assignor("mine", 0, 1, 0, 1, b"12345")
    group.members["a"] = Member("a", MemberMetadata(topics=("foo", "bar"), client_assignors=(assignor,)))
    group.members["b"] = Member("b", MemberMetadata(classic=Classic(10_000, (("range", b"1234"),))))
    machine = cast(Any, SimpleNamespace(groups={"g": group}))
    group.targets["a"] = ((UUID(int=1), (0, 1, 2)),)
    size_a, size_b = MEMBER_SIZE + 6 + 5 + 3 * ASSIGNED_SIZE, MEMBER_SIZE + len("range") + 4
    assert list(held_by([machine])) == [GROUP_SIZE + 1, size_a, size_b]


def test_metadata_is_admitted_up_to_the_bound_and_again_when_members_have_left() -> None:
    held, now, counts = 0, 0.0, 0

    def count() -> list[int]:
        nonlocal counts
        counts += 1
        return [held]

    admission = MetadataAdmission(4_000, 10_000, count, lambda: now)
    assert "group.member.metadata.max.bytes is 4000" in admission.refuses(4_001, "g")
    for _ in range(2):
        assert not admission.refuses(4_000, "g")
        held += 4_000
    assert "group.metadata.max.bytes is 10000" in admission.refuses(4_000, "g")
    assert not admission.refuses(SMALL_SIZE, "g")
    held, now = 0, now + COUNT_INTERVAL_S / 2
    counts = 0
    assert admission.refuses(4_000, "g")
    assert counts == 0
    now += COUNT_INTERVAL_S
    assert not admission.refuses(4_000, "g")
    assert counts == 1


def test_members_without_metadata_and_their_groups_are_admitted_up_to_the_bound() -> None:
    admission = MetadataAdmission(4_000, 100_000, list, lambda: 0.0)
    admitted = sum(not admission.refuses(0, f"g{it}", newcomer=True) for it in range(100))
    assert admitted == 100_000 // (GROUP_SIZE + MEMBER_SIZE + 2)
    assert not admission.refuses(SMALL_SIZE, "g", newcomer=False), "who is there goes on"


def test_many_groups_are_counted_beside_other_work_and_what_is_admitted_meanwhile_counts() -> None:
    async def scenario() -> None:
        now, steps = 0.0, 0

        def count() -> Iterator[int]:
            nonlocal steps
            for _ in range(6 * COUNTED_PER_STEP):
                steps += 1
                yield 10

        admission = MetadataAdmission(1 << 20, 60_000_000, count, lambda: now)
        for it in range(6_000):
            assert not admission.refuses(0, str(it), newcomer=True)
        now, steps = 100.0, 0
        assert not admission.refuses(0, "first", newcomer=True)
        assert steps == 0
        await asyncio.sleep(0)
        assert steps == COUNTED_PER_STEP
        assert not admission.refuses(4_000, "g"), "beside the count"
        while steps < 6 * COUNTED_PER_STEP or admission.held > 1_000_000:
            await asyncio.sleep(0)
        assert admission.held == 6 * COUNTED_PER_STEP * 10 + 4_000 + GROUP_SIZE + MEMBER_SIZE + len("first")

    asyncio.run(scenario())
