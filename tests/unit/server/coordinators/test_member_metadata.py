"""What members hold never passes its bound, and is not counted more often than need be."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.consumer.group import Assignor, Classic, ConsumerGroup, Member, MemberMetadata
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.settings import GroupSettings
from anabranch.protocol.messages.consumer_group_heartbeat import Assignor as RequestAssignor
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from anabranch.server.coordinators.member_metadata import (
    ASSIGNED_SIZE,
    COUNT_INTERVAL_S,
    COUNTED_PER_STEP,
    GROUP_SIZE,
    MEMBER_ID_COPIES,
    MEMBER_SIZE,
    PENDING_SIZE,
    SMALL_SIZE,
    MetadataAdmission,
    heartbeat_size,
    held_by,
    join_size,
)

LONG = "é\U0001f600" * 100
"""Four bytes of memory for each of its characters."""
BYTES = 4 * len(LONG)


def held(group: Any) -> list[int]:
    return list(held_by([cast(Any, SimpleNamespace(groups={group.group_id: group}))]))


def test_members_of_groups_of_the_consumer_protocol_are_counted() -> None:
    """Of either protocol: names of topics, metadata of assignors, and what a classic member said of its strategies."""
    group = ConsumerGroup("g")
    assignor = Assignor("mine", 0, 1, 0, 1, b"12345")
    group.members["a"] = Member("a", MemberMetadata(topics=("foo", "bar"), client_assignors=(assignor,)))
    group.members["b"] = Member("b", MemberMetadata(classic=Classic(10_000, (("range", b"1234"),))))
    group.targets["a"] = ((UUID(int=1), (0, 1, 2)),)
    size_a, size_b = MEMBER_SIZE + 6 + 5 + len("mine") + 3 * ASSIGNED_SIZE, MEMBER_SIZE + len("range") + 4
    assert held(group) == [GROUP_SIZE + 1, *(MEMBER_ID_COPIES + size for size in (size_a, size_b))]


def heartbeat(**said: Any) -> ConsumerGroupHeartbeatRequest:
    given = {"group_id": "g", "member_id": "m", "member_epoch": 0, "rebalance_timeout_ms": 1, "topic_partitions": []}
    return ConsumerGroupHeartbeatRequest(**{**given, "subscribed_topic_names": [], **said})


@pytest.mark.parametrize(
    "said",
    [
        {"member_id": LONG},
        {"instance_id": LONG},
        {"rack_id": LONG},
        {"subscribed_topic_regex": LONG},
        {"subscribed_topic_names": [LONG]},
        {"client_assignors": [RequestAssignor(name=LONG, metadata_bytes=b"")]},
        {},
    ],
    ids=lambda said: next(iter(said), "client id"),
)
def test_every_string_that_a_member_says_in_a_heartbeat_is_admitted_and_counted(said: dict[str, Any]) -> None:
    coordinator = Coordinator(GroupSettings())
    request, client_id = heartbeat(**said), "" if said else LONG
    admitted = heartbeat_size(request, client_id, names_max=10)
    assert admitted >= BYTES
    outcome = coordinator.consumer_group_heartbeat(request, Caller(client_id=client_id), 0)
    assert outcome.reply.error_code == ErrorCode.NONE
    for record in outcome.records:
        coordinator.apply(record)
    _, member = held(coordinator.groups["g"])
    assert BYTES <= member - MEMBER_SIZE <= admitted


def test_heartbeats_that_are_refused_leave_nothing_of_their_groups() -> None:
    coordinator, count = Coordinator(GroupSettings()), 100
    coordinator.consumer_group_heartbeat(heartbeat(group_id="first", subscribed_topic_regex="a("), Caller(), 0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            request = heartbeat(group_id=f"{number}" + "g" * 10_000, subscribed_topic_regex="a(")
            outcome = coordinator.consumer_group_heartbeat(request, Caller(), 0)
            assert outcome.reply.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
        del request
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < count * 1_000


@pytest.mark.parametrize(
    "said",
    [
        {"group_instance_id": LONG},
        {"protocol_type": LONG},
        {"protocols": [JoinGroupRequestProtocol(name=LONG, metadata=b"")]},
        {},
    ],
    ids=lambda said: next(iter(said), "client id"),
)
def test_every_string_that_a_member_says_as_it_joins_is_admitted_and_counted(said: dict[str, Any]) -> None:
    coordinator = Coordinator(GroupSettings())
    request, client_id = join(**said), "" if said else LONG
    admitted = join_size(request, client_id)
    assert admitted >= BYTES
    coordinator.join_group(request, Caller(client_id, version=3, member_id="1"), 1, 0)
    assert BYTES <= sum(held(coordinator.groups["g"])) - GROUP_SIZE - MEMBER_SIZE <= admitted + 4 * 300


def join(**said: Any) -> JoinGroupRequest:
    protocols = [JoinGroupRequestProtocol(name="range", metadata=b"")]
    given = {"group_id": "g", "session_timeout_ms": 10_000, "protocol_type": "consumer", "protocols": protocols}
    return JoinGroupRequest(**{**given, **said})


def test_ids_that_nobody_joins_with_are_counted_until_their_session_is_over() -> None:
    coordinator = Coordinator(GroupSettings())
    for number in range(3):
        caller = Caller(LONG, version=5, member_id=str(number))
        outcome = coordinator.join_group(join(), caller, number, 0)
        assert outcome.reply.error_code == ErrorCode.MEMBER_ID_REQUIRED
    _, *pending = held(coordinator.groups["g"])
    assert len(pending) == 3 and min(pending) > PENDING_SIZE + BYTES
    (timer,) = outcome.timers
    coordinator.on_timer(timer.key, 10_000)
    assert len(held(coordinator.groups["g"])) == 1 + 2


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
