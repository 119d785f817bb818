"""DescribeLoad (API 10006), ours: what is appended to each part of the key space of partitions."""

from __future__ import annotations

import asyncio

from anabranch.base.errors import ErrorCode
from anabranch.machines.partition.load import HALF_LIFE_MS
from anabranch.protocol.messages.describe_load import (
    DescribeLoadRequest,
    DescribeLoadResponse,
    DescribeLoadResponsePartition,
    DescribeLoadResponseTopic,
)
from anabranch.server.context import BrokerContext, Large, RequestContext

DESCRIBED_MAX = 1_000
"""How many partitions a request may name: the answer has 1 KiB of each."""
DESCRIBED_AT_A_TIME = 50
NOT_ALLOWED = "Load by key is known of topics with accept.range.fetch=true only."


async def handle_describe_load(broker: BrokerContext, request: DescribeLoadRequest, call: RequestContext) -> Large:
    """Describe the load of each partition; refuse a request that names too many."""
    count, what = len(request.topics), "topics"
    if count <= DESCRIBED_MAX:
        count, what = sum(len(topic.partition_indexes) for topic in request.topics), "partitions"
    if count > DESCRIBED_MAX:
        message = f"{count} {what} are too many: name at most {DESCRIBED_MAX}."
        refused = DescribeLoadResponse(error_code=ErrorCode.INVALID_REQUEST, error_message=message)
        return Large(lambda: refused)
    named = [(topic.name, [*topic.partition_indexes]) for topic in request.topics]
    topics: list[DescribeLoadResponseTopic] = []
    described = 0
    for name, numbers in named:
        found: list[DescribeLoadResponsePartition] = []
        for number in numbers:
            found.append(_described(broker, name, number))
            described += 1
            if described % DESCRIBED_AT_A_TIME == 0:
                await asyncio.sleep(0)
        topics.append(DescribeLoadResponseTopic(name=name, partitions=found))
    return Large(lambda: DescribeLoadResponse(half_life_ms=HALF_LIFE_MS, topics=topics))


def _described(broker: BrokerContext, topic: str, number: int) -> DescribeLoadResponsePartition:
    partition = broker.replicas.get(topic, number)
    if partition is None:
        return _refused(number, broker.replicas.missing(topic, number))
    unavailable = partition.unavailable()
    if unavailable is not ErrorCode.NONE:
        return _refused(number, unavailable)
    if not partition.settings.accepts_range_fetch:
        return _refused(number, ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED, NOT_ALLOWED)
    load = broker.loads.of(partition)
    return DescribeLoadResponsePartition(
        partition_index=number,
        key_range_start=load.held.start,
        key_range_end=load.held.end,
        observed_ms=load.observed_ms,
        records_per_second=load.records,
        bytes_per_second=load.bytes,
    )


def _refused(number: int, error: ErrorCode, message: str | None = None) -> DescribeLoadResponsePartition:
    return DescribeLoadResponsePartition(partition_index=number, error_code=error, error_message=message)
