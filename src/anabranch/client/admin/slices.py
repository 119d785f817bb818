"""The slices that members of a group hold, as the leaders of the partitions have them (DescribeSlices)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.cluster.metadata import Cluster
from anabranch.protocol.messages.describe_slices import (
    DescribeSlicesRequest,
    DescribeSlicesTopic,
)

ASKED_MAX = 1_000
"""Partitions of one request; a broker refuses more."""


class HeldSlices(NamedTuple):
    """What one member of a group holds of a partition."""

    member_id: str
    slices: int
    records: int
    """Offsets of all its slices."""
    first_offset: int
    last_offset: int
    """Inclusive; other members may hold some of what lies between."""


async def describe_slices(
    cluster: Cluster, group_id: str, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, list[HeldSlices]]:
    """Ask the leaders; partitions of which nothing is held, or that cannot be asked for, are left out. ApiError."""
    found: dict[TopicPartition, list[HeldSlices]] = {}
    for leader, asked in (await _by_leader(cluster, partitions)).items():
        connection = await cluster.connection(leader)
        if not connection.serves(DescribeSlicesRequest):
            continue
        for begin in range(0, len(asked), ASKED_MAX):
            numbers: dict[str, list[int]] = {}
            for name, number in asked[begin : begin + ASKED_MAX]:
                numbers.setdefault(name, []).append(number)
            topics = [DescribeSlicesTopic(name=name, partition_indexes=listed) for name, listed in numbers.items()]
            response = await cluster.ask(DescribeSlicesRequest(group_id=group_id, topics=topics), node_id=leader)
            if response.error_code:
                code = ErrorCode.of(response.error_code)
                raise ApiError(code, f"the slices cannot be read: {response.error_message or code.name}")
            for topic in response.topics:
                for it in topic.partitions:
                    if it.members:
                        found[TopicPartition(topic.name, it.partition_index)] = [
                            HeldSlices(each.member_id, each.slices, each.records, each.first_offset, each.last_offset)
                            for each in it.members
                        ]
    return dict(sorted(found.items()))


async def _by_leader(cluster: Cluster, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
    by_leader: dict[int, list[TopicPartition]] = {}
    asked = sorted(set(partitions))
    known = await cluster.topics(sorted({tp.topic for tp in asked})) if asked else {}
    for tp in asked:
        info = known.get(tp.topic)
        leader = -1 if info is None or isinstance(info, ApiError) else info.leaders.get(tp.partition, -1)
        if leader >= 0:
            by_leader.setdefault(leader, []).append(tp)
    return by_leader
