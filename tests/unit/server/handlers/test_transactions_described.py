"""DescribeTransactions: one that holds many partitions is described in a thread, as its answer is encoded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.transactions.coordinator import Coordinator
from anabranch.machines.transactions.transaction import Transaction, first
from anabranch.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from anabranch.server.context import ANONYMOUS, PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext
from anabranch.server.handlers.transactions import handle_describe_transactions

CALL = RequestContext(ANONYMOUS, None, "peer:1", 1, 0)


def broker_of(known: dict[str, Transaction], unavailable: str = "") -> BrokerContext:
    machine = cast(Coordinator, SimpleNamespace(transaction=known.get))

    def shard_of(name: str) -> Any:
        if name == unavailable:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "not yet")
        return SimpleNamespace(read=lambda look: look(machine, 0))

    return cast(BrokerContext, SimpleNamespace(transactions=SimpleNamespace(shard_of=shard_of)))


def holding(count: int) -> Transaction:
    return first(7, 60_000, 0).grown([TopicPartition("t", number) for number in range(count)], 5)


def described(broker: BrokerContext, *names: str) -> DescribeTransactionsResponse | Large:
    request = DescribeTransactionsRequest(transactional_ids=list(names))
    return asyncio.run(handle_describe_transactions(broker, request, CALL))


@pytest.mark.parametrize("each", [1, PARTITIONS_AT_A_TIME // 10, PARTITIONS_AT_A_TIME])
def test_an_answer_is_large_by_the_partitions_of_all_that_it_describes(each: int) -> None:
    names = [f"tx{number}" for number in range(10)]
    answer = described(broker_of({name: holding(each) for name in names}), *names)
    assert isinstance(answer, Large) is (each > 1)
    made = answer.make() if isinstance(answer, Large) else answer
    found = [(it.transactional_id, it.topics[0].partitions) for it in made.transaction_states]
    assert found == [(name, [*range(each)]) for name in names]


def test_each_is_described_once_and_on_its_own() -> None:
    answer = described(broker_of({"a": holding(1)}, "loading"), "a", "loading", "a", "unknown")
    assert isinstance(answer, DescribeTransactionsResponse)
    assert [(it.transactional_id, it.error_code) for it in answer.transaction_states] == [
        ("a", ErrorCode.NONE),
        ("loading", ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        ("unknown", ErrorCode.TRANSACTIONAL_ID_NOT_FOUND),
    ]
