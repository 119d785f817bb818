"""Transactions that hold many partitions, of many producers at once: nobody is held up, and no memory taken unseen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.describe_transactions import DescribeTransactionsRequest
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from tests.support.broker import running
from tests.support.steps import in_short_steps
from tests.support.transactions import TransactionalProducer
from tests.support.wire import WireClient

OK = ErrorCode.NONE
COUNT = 3_000
TRANSACTIONS = 24
TIMEOUT_S = 60.0
PRODUCER_BYTES = "kafka_server_replicamanager_producerstate_bytes"
COMPLETING = "anabranch_transactions_completing"


def test_large_transactions_are_described_and_time_out_in_short_steps(tmp_path: Path) -> None:
    """All in one shard: it is told of them all by one timer."""
    settings: dict[str, object] = {
        "transaction.state.log.num.partitions": 1,
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
    }
    names = [f"tx{number}" for number in range(TRANSACTIONS)]
    with running(tmp_path, **settings) as broker, WireClient(broker.port, TIMEOUT_S) as client:
        client.create("t", COUNT)

        def states() -> list[Any]:
            return client.call(DescribeTransactionsRequest(transactional_ids=names)).transaction_states

        def time_out() -> list[Any]:
            for name in names:
                assert TransactionalProducer(client, name, timeout_ms=2_000).init().add("t", *range(COUNT)) is OK
            held = states()
            deadline = time.monotonic() + TIMEOUT_S
            while {state.transaction_state for state in states()} != {"CompleteAbort"}:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            return held

        held = in_short_steps(broker, time_out, works=("DescribeTransactions", "Shard._on_timer"))
        assert [it.transactional_id for it in held] == names
        assert {len(topic.partitions) for it in held for topic in it.topics} == {COUNT}
        assert broker.metrics()[COMPLETING] == 0


def test_partitions_that_a_transaction_names_and_does_not_write_into_cost_nothing(tmp_path: Path) -> None:
    with running(tmp_path, **{"producer.state.max.bytes": 130_000}) as broker, WireClient(broker.port) as client:
        client.create("t", 200)
        writing = TransactionalProducer(client, "writing").init()
        assert writing.send("t", 7, b"v") is OK
        for number in range(5):
            other = TransactionalProducer(client, f"tx{number}").init()
            assert other.add("t", *range(200)) is OK
            other.abort()
        writing.commit()
        assert broker.metrics()[PRODUCER_BYTES] == 1_300
        assert [path.name for path in tmp_path.glob("t-*")] == ["t-7"]
        assert client.offset_at("t", 7, -1).offset == 2


def test_producers_of_offsets_count_in_the_memory_of_producers(tmp_path: Path) -> None:
    with running(tmp_path, **{"producer.state.max.bytes": 13_000}) as broker, WireClient(broker.port) as client:
        client.create("t")
        client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]), 4)
        producers = [TransactionalProducer(client, f"tx{number}").init() for number in range(12)]
        codes = [each.commit_offset("g", "t", 0, number) for number, each in enumerate(producers)]
        assert codes == [OK] * 10 + [ErrorCode.POLICY_VIOLATION] * 2
        assert broker.metrics()[PRODUCER_BYTES] == 13_000
        assert broker.until_said("warning", "producer refused")
        for each in producers:
            each.commit()
        assert producers[0].commit_offset("g", "t", 0, 1) is OK, "it is known there"
