"""The owner of a key, where sharers of its partitions are not equally far."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.client import MemberDescription, OffsetAndMetadata
from anabranch.client.settings import ConsumerSettings
from anabranch.client.table import owners
from anabranch.machines.key_history import KeyHistory, Stay
from anabranch.machines.keyspace import SPACE, Interval, cuts

LOW, UP = cuts(SPACE, 2)
OLD, NEW = TopicPartition("t", 0), TopicPartition("t", 2)
EVEN = OffsetAndMetadata(43)
LOWER_BEHIND = OffsetAndMetadata(43, shares=[(*LOW, 43), (*UP, 100)])
UPPER_BEHIND = OffsetAndMetadata(43, shares=[(*LOW, 100), (*UP, 43)])


def member(name: str, keys: Interval) -> MemberDescription:
    held = frozenset({OLD, NEW})
    ranges = dict.fromkeys(held, (keys,))
    return MemberDescription(name, None, name, "/host", 1, ("t",), None, held, held, "consumer", ranges)


class Admin:
    """Knows a key that was in partition 0 up to offset 100, and is in partition 2 since."""

    def __init__(self, spread: int, at: OffsetAndMetadata | None) -> None:
        self._spread, self._at = spread, at

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def explain(self, topic: str, key: bytes) -> KeyHistory:
        stays = (
            Stay(1, 1, 0, cast(Any, None), 0, 100, None, None),
            Stay(2, 3, 2, cast(Any, None), 0, 10, None, None),
        )
        return KeyHistory(key, 0, 0, self._spread, 2, SPACE, stays)

    async def list_group_offsets(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        return {} if self._at is None else {OLD: self._at, NEW: OffsetAndMetadata(10)}

    async def describe_groups(self, group: str) -> dict[str, Any]:
        return {group: SimpleNamespace(members=(member("lower", LOW), member("upper", UP)))}


@pytest.mark.parametrize(
    ("spread", "at", "partition"),
    [
        (UP.start, UPPER_BEHIND, OLD),
        (UP.end, LOWER_BEHIND, NEW),
        (LOW.start, UPPER_BEHIND, NEW),
        (LOW.end, LOWER_BEHIND, OLD),
        (LOW.start, EVEN, OLD),
        (UP.end, EVEN._replace(offset=100), NEW),
        (UP.end, None, OLD),
    ],
)
def test_a_key_is_of_the_earlier_partition_until_its_own_records_there_are_read(
    spread: int, at: OffsetAndMetadata | None, partition: TopicPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "Admin", lambda **_: Admin(spread, at))
    consumer = SimpleNamespace(settings=ConsumerSettings(group_id="g"))
    found = asyncio.run(owners.Owners(cast(Any, consumer), "g", "t").owner_of(b"k"))
    assert found.member is not None
    assert (found.partition, found.member.member_id) == (partition, "lower" if spread <= LOW.end else "upper")
