"""The load of topics by key, as the leaders of their partitions count it (DescribeLoad)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.cluster.metadata import Cluster
from anabranch.machines.keyspace import Interval
from anabranch.machines.partition.load import PartitionLoad
from anabranch.protocol.messages.describe_load import DescribeLoadRequest, DescribeLoadResponse, DescribeLoadTopic

ASKED_MAX = 1_000
"""Partitions of one request; a broker refuses more."""
ATTEMPTS_MAX = 5
RETRY_BACKOFF_S = 0.1


async def describe_load(cluster: Cluster, topics: Sequence[str]) -> dict[TopicPartition, PartitionLoad]:
    """Ask the leaders of all partitions; those that are offline are left out. ApiError."""
    found: dict[TopicPartition, PartitionLoad] = {}
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            for leader, asked in (await _by_leader(cluster, topics, found)).items():
                for begin in range(0, len(asked), ASKED_MAX):
                    found.update(await _ask(cluster, leader, asked[begin : begin + ASKED_MAX]))
            break
        except ApiError as error:
            if attempt == ATTEMPTS_MAX or not error.retriable:
                raise
            await asyncio.sleep(RETRY_BACKOFF_S)
    return dict(sorted(found.items()))


async def _by_leader(
    cluster: Cluster, topics: Sequence[str], known: dict[TopicPartition, PartitionLoad]
) -> dict[int, list[TopicPartition]]:
    by_leader: dict[int, list[TopicPartition]] = {}
    for name, info in (await cluster.topics(topics)).items():
        if isinstance(info, ApiError):
            raise info
        for number, leader in info.leaders.items():
            if leader >= 0 and (tp := TopicPartition(name, number)) not in known:
                by_leader.setdefault(leader, []).append(tp)
    return by_leader


async def _ask(cluster: Cluster, leader: int, asked: Sequence[TopicPartition]) -> dict[TopicPartition, PartitionLoad]:
    connection = await cluster.connection(leader)
    if not connection.serves(DescribeLoadRequest):
        raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"broker {leader} does not count load by key")
    numbers: dict[str, list[int]] = {}
    for name, number in asked:
        numbers.setdefault(name, []).append(number)
    wanted = [DescribeLoadTopic(name=name, partition_indexes=listed) for name, listed in numbers.items()]
    return dict(_loads(await cluster.ask(DescribeLoadRequest(topics=wanted), node_id=leader)))


def _loads(response: DescribeLoadResponse) -> Iterator[tuple[TopicPartition, PartitionLoad]]:
    if response.error_code:
        code = ErrorCode.of(response.error_code)
        raise ApiError(code, f"the load cannot be read: {response.error_message or code.name}")
    for topic in response.topics:
        for it in topic.partitions:
            tp = TopicPartition(topic.name, it.partition_index)
            code = ErrorCode.of(it.error_code)
            if code is ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED:
                text = f"the load of {topic.name} by key is not counted; `anabranch topic config {topic.name} "
                raise ApiError(code, text + "accept.range.fetch=true` has it counted from then on")
            if code is ErrorCode.KAFKA_STORAGE_ERROR:
                continue
            if code is not ErrorCode.NONE:
                raise ApiError(code, f"the load of {tp} cannot be read: {it.error_message or code.name}")
            held = Interval(it.key_range_start, it.key_range_end)
            yield tp, PartitionLoad(held, it.observed_ms, (*it.records_per_second,), (*it.bytes_per_second,))
