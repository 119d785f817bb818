"""What members hold never passes its bound, and is not counted more often than need be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from anabranch.machines.groups.consumer.group import Assignor, Classic, ConsumerGroup, Member, MemberMetadata
from anabranch.server.coordinators.member_metadata import COUNT_INTERVAL_S, SMALL_SIZE, MetadataAdmission, held_by


def test_members_of_groups_of_the_consumer_protocol_are_counted() -> None:
    """Of either protocol: names of topics, metadata of assignors, and what a classic member said of its strategies."""
    group = ConsumerGroup("g")
    assignor = Assignor("mine", 0, 1, 0, 1, b"12345")
    group.members["a"] = Member("a", MemberMetadata(topics=("foo", "bar"), client_assignors=(assignor,)))
    group.members["b"] = Member("b", MemberMetadata(classic=Classic(10_000, (("range", b"1234"),))))
    machine = cast(Any, SimpleNamespace(groups={"g": group}))
    assert held_by([machine]) == 6 + 5 + len("range") + 4


def test_metadata_is_admitted_up_to_the_bound_and_again_when_members_have_left() -> None:
    held, now, counts = 0, 0.0, 0

    def count() -> int:
        nonlocal counts
        counts += 1
        return held

    admission = MetadataAdmission(4_000, 10_000, count, lambda: now)
    assert "group.member.metadata.max.bytes is 4000" in admission.refuses(4_001, "g")
    for _ in range(2):
        assert not admission.refuses(4_000, "g")
        held += 4_000
    assert counts == 0
    assert "group.metadata.max.bytes is 10000" in admission.refuses(4_000, "g")
    assert not admission.refuses(SMALL_SIZE, "g")
    held, now = 0, COUNT_INTERVAL_S / 2
    assert admission.refuses(4_000, "g")
    assert counts == 1
    now = COUNT_INTERVAL_S
    assert not admission.refuses(4_000, "g")
    assert counts == 2
