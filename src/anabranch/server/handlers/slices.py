"""DescribeSlices (API 10007), ours: which members of a group hold slices of partitions (ADR 0053)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from anabranch.base.errors import ErrorCode
from anabranch.machines.partition.slices import Slice
from anabranch.protocol.messages.describe_slices import (
    DescribeSlicesMember,
    DescribeSlicesRequest,
    DescribeSlicesResponse,
    DescribeSlicesResponsePartition,
    DescribeSlicesResponseTopic,
)
from anabranch.server.context import BrokerContext, Large, RequestContext

DESCRIBED_MAX = 1_000
"""How many partitions a request may name: each may have a thousand members."""
COPIED_AT_A_TIME = 20_000
"""Slices that are copied before other work has its turn."""
Found = Sequence[Slice] | ErrorCode


async def handle_describe_slices(broker: BrokerContext, request: DescribeSlicesRequest, call: RequestContext) -> Large:
    """Say of each partition which members hold slices; refuse a request that names too many."""
    count, what = len(request.topics), "topics"
    if count <= DESCRIBED_MAX:
        count, what = sum(len(topic.partition_indexes) for topic in request.topics), "partitions"
    if count > DESCRIBED_MAX:
        message = f"{count} {what} are too many: name at most {DESCRIBED_MAX}."
        refused = DescribeSlicesResponse(error_code=ErrorCode.INVALID_REQUEST, error_message=message)
        return Large(lambda: refused)
    topics: list[tuple[str, list[tuple[int, Found]]]] = []
    copied = 0
    for topic in request.topics:
        held: list[tuple[int, Found]] = []
        for number in topic.partition_indexes:
            found = _held(broker, request.group_id, topic.name, number)
            held.append((number, found))
            copied += 100 + (0 if isinstance(found, ErrorCode) else len(found))
            if copied >= COPIED_AT_A_TIME:
                copied = 0
                await asyncio.sleep(0)
        topics.append((topic.name, held))
    return Large(
        lambda: DescribeSlicesResponse(
            topics=[
                DescribeSlicesResponseTopic(name=name, partitions=[_partition(*it) for it in held])
                for name, held in topics
            ]
        )
    )


def _held(broker: BrokerContext, group_id: str, topic: str, number: int) -> Found:
    partition = broker.replicas.get(topic, number)
    if partition is None:
        return broker.replicas.missing(topic, number)
    return partition.unavailable() or broker.slices.held(group_id, partition)


def _partition(number: int, found: Found) -> DescribeSlicesResponsePartition:
    if isinstance(found, ErrorCode):
        return DescribeSlicesResponsePartition(partition_index=number, error_code=found)
    members: dict[str, DescribeSlicesMember] = {}
    for each in sorted((it for it in found if not it.session.is_over), key=lambda it: it.start):
        member = members.get(each.member_id)
        if member is None:
            member = DescribeSlicesMember(member_id=each.member_id, first_offset=each.start)
            members[each.member_id] = member
        member.slices += 1
        member.records += each.end - each.start + 1
        member.last_offset = each.end
    return DescribeSlicesResponsePartition(partition_index=number, members=list(members.values()))
