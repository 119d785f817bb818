"""Members that name more keys than anybody has: refused with a sentence, and in short steps of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.key_ranges import RANGES_IN_ALL_MAX
from anabranch.machines.keyspace import SPACE_END
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    KeyRange,
    PartitionKeyRanges,
    TopicPartitions,
)
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.steps import in_short_steps

MANY = 6_000


def ranges(count: int) -> list[KeyRange]:
    return [KeyRange(start=4 * place, end=4 * place + 1) for place in range(count)]


HOSTILE = {
    "a range of each of many partitions": [(number, ranges(1)) for number in reversed(range(MANY))],
    "many ranges of some partitions": [(number, ranges(900)) for number in range(20)],
    "one partition again and again": [(0, ranges(900)) for _ in range(20)],
    "too many ranges of one partition": [(0, ranges(50_000))],
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data")) as broker:
        yield broker


@pytest.mark.parametrize("named", HOSTILE.values(), ids=[*HOSTILE])
def test_a_member_that_reports_too_many_ranges_is_refused_in_short_steps(
    process: BrokerProcess, named: list[tuple[int, list[KeyRange]]]
) -> None:
    with GroupClient(process.port) as client:
        client.ready("hostile")
        epoch = client.beat("hostile", "m", 0, allow_key_share=True).member_epoch
        entries = [PartitionKeyRanges(partition=number, ranges=its) for number, its in named]
        owned = TopicPartitions(
            topic_id=UUID(int=7), partitions=sorted({number for number, _ in named}), key_ranges=entries
        )
        request = ConsumerGroupHeartbeatRequest(
            group_id="hostile", member_id="m", member_epoch=epoch, topic_partitions=[owned]
        )
        refused = in_short_steps(process, lambda: client.call(request, 1))
        assert refused.error_code == ErrorCode.INVALID_REQUEST
        assert "ranges of keys are named" in refused.error_message
        client.beat("hostile", "m", -1)


def test_as_many_ranges_as_may_be_named_and_whole_partitions_take_short_steps(process: BrokerProcess) -> None:
    with GroupClient(process.port) as client:
        client.ready("many")
        epoch = client.beat("many", "m", 0, allow_key_share=True).member_epoch
        whole = [KeyRange(start=0, end=SPACE_END)]
        named = [(number, ranges(1) if number < RANGES_IN_ALL_MAX else whole) for number in range(MANY)]
        owned = TopicPartitions(
            topic_id=UUID(int=7),
            partitions=[*range(MANY)],
            key_ranges=[PartitionKeyRanges(partition=number, ranges=its) for number, its in named],
        )
        request = ConsumerGroupHeartbeatRequest(
            group_id="many", member_id="m", member_epoch=epoch, topic_partitions=[owned]
        )
        answer = in_short_steps(process, lambda: client.call(request, 1))
        assert answer.error_code == ErrorCode.NONE, answer.error_message
        client.beat("many", "m", -1)
