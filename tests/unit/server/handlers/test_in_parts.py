"""A long request is cut into parts that name the same things in the same order, and its answer is whole."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from anabranch.base.limits import STRING_SIZE_MAX
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from anabranch.protocol.messages.describe_groups import DescribeGroupsRequest
from anabranch.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    PartitionResponse,
    TopicRequest,
    TopicResponse,
)
from anabranch.server.context import PARTITIONS_AT_A_TIME, Large
from anabranch.server.handlers import ENDPOINTS
from anabranch.server.handlers.in_parts import LENGTH_AT_ONCE, gather_in_steps, work_of_name

NOTHING: Any = None


def test_parts_name_everything_once_in_order_and_their_answers_are_joined() -> None:
    sizes: list[int] = []

    def handle(broker: Any, request: DescribeProducersRequest, call: Any) -> DescribeProducersResponse:
        sizes.append(sum(len(it.partition_indexes) for it in request.topics))
        return DescribeProducersResponse(
            topics=[
                TopicResponse(
                    name=it.name, partitions=[PartitionResponse(partition_index=n) for n in it.partition_indexes]
                )
                for it in request.topics
            ]
        )

    chance = random.Random(3)
    endpoint = ENDPOINTS[61]._replace(handler=handle)
    for counts in ([0] * 1_200, [499, 1, 1], [500, 500], [501], [1_000], [3, 1_499, 0, 700]):
        for lengths in (counts, [chance.randrange(900) for _ in range(5)]):
            asked = [(f"t{it}", [*range(length)]) for it, length in enumerate(lengths)]
            request = DescribeProducersRequest(
                topics=[TopicRequest(name=name, partition_indexes=numbers) for name, numbers in asked]
            )
            found = endpoint.handle(NOTHING, request, NOTHING)
            if asyncio.iscoroutine(found):
                found = asyncio.run(found)
                assert isinstance(found, Large)
                found = found.make()
            assert [(it.name, [at.partition_index for at in it.partitions]) for it in found.topics] == asked
    assert max(sizes) <= PARTITIONS_AT_A_TIME


def test_a_part_has_fewer_names_the_longer_they_are() -> None:
    parts = ENDPOINTS[15].parts
    assert parts is not None

    def lengths_of(*names: str) -> list[list[int]]:
        request = DescribeGroupsRequest(groups=[*names])
        assert parts.long(request) == (sum(map(work_of_name, names)) >= PARTITIONS_AT_A_TIME)
        return [[*map(len, part.groups)] for _, part in parts.split(request)]

    longest, long = "x" * STRING_SIZE_MAX, "y" * (50 * LENGTH_AT_ONCE)
    assert lengths_of(longest, longest, "g") == [[len(longest)], [len(longest)], [1]]
    assert lengths_of(*[long] * 5) == [[len(long)] * 4, [len(long)]]
    assert lengths_of(*"abc") == [[1, 1, 1]]


def test_what_is_named_again_is_answered_once() -> None:
    request = DescribeGroupsRequest(groups=["a", "b", "a"])
    parts = ENDPOINTS[15].parts
    assert parts is not None
    parts.once(request)
    assert request.groups == ["a", "b"]
    twice = TopicRequest(name="t", partition_indexes=[1, 1, 2]), TopicRequest(name="t", partition_indexes=[2, 3])
    producers = DescribeProducersRequest(topics=[*twice])
    parts = ENDPOINTS[61].parts
    assert parts is not None
    parts.once(producers)
    assert [it.partition_indexes for it in producers.topics] == [[1, 2], [3]]


def test_parts_of_which_there_is_much_are_made_with_the_whole_answer_of_which_one_is_made_at_a_time() -> None:
    """Of some parts even one is more than a step may do, and those of many requests together would take much memory."""
    makers: list[int] = []

    def handle(broker: Any, request: DescribeProducersRequest, call: Any) -> Large:
        def make() -> DescribeProducersResponse:
            makers.append(len(request.topics))
            return DescribeProducersResponse(topics=[TopicResponse(name=it.name) for it in request.topics])

        return Large(make)

    names = [f"t{number}" for number in range(2 * PARTITIONS_AT_A_TIME)]
    request = DescribeProducersRequest(topics=[TopicRequest(name=name, partition_indexes=[]) for name in names])
    found = asyncio.run(ENDPOINTS[61]._replace(handler=handle).handle(NOTHING, request, NOTHING))
    assert not makers
    assert [it.name for it in found.make().topics] == names
    assert sum(makers) == len(names) and len(makers) > 1


def test_what_takes_long_to_find_ends_a_step_sooner() -> None:
    async def steps(weights: list[int]) -> list[int]:
        """How many are found in each step."""
        found, ended = [0], asyncio.Event()

        async def other() -> None:
            while not ended.is_set():
                found.append(0)
                await asyncio.sleep(0)

        def find(weight: int) -> int:
            found[-1] += 1
            return weight

        beside = asyncio.create_task(other())
        assert await gather_in_steps(map(find, weights), lambda weight: weight) == weights
        ended.set()
        await beside
        return [count for count in found if count]

    most = PARTITIONS_AT_A_TIME
    assert asyncio.run(steps([1] * (most + 2))) == [most, 2]
    assert asyncio.run(steps([most, 5 * most, 1, most - 1, 1])) == [1, 1, 2, 1]


def test_what_is_said_last_of_a_struct_that_is_named_again_counts() -> None:
    parts = ENDPOINTS[21].parts
    assert parts is not None

    def topic(name: str, *offsets: tuple[int, int]) -> DeleteRecordsTopic:
        partitions = [DeleteRecordsPartition(partition_index=number, offset=offset) for number, offset in offsets]
        return DeleteRecordsTopic(name=name, partitions=partitions)

    request = DeleteRecordsRequest(
        topics=[topic("t", (0, 1), (1, 2), (0, 3)), topic("u", (0, 7)), topic("t", (2, 4), (1, 9))]
    )
    parts.once(request)
    found = [(it.name, [(at.partition_index, at.offset) for at in it.partitions]) for it in request.topics]
    assert found == [("t", [(0, 3), (1, 9)]), ("u", [(0, 7)]), ("t", [(2, 4)])]
