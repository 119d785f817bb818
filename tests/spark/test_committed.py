"""Committed records alone, through resizes: what a stream and a batch read while transactions are open, and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.client.sync import Producer
from anabranch.spark.plan import DataLossError, verify_history
from tests.spark.flow import KEYS, Flow, MicroBatches, batch_read

UNCOMMITTED = {"kafka.isolation.level": "read_uncommitted"}


@pytest.fixture(params=["false", "true"])
def flow(address: str, request: pytest.FixtureRequest) -> Iterator[Flow]:
    """A topic, with the broker filtering key ranges and without."""
    name = request.node.name.replace("[", "-").replace("]", "")
    flow = Flow(address, name, configs={"accept.range.fetch": request.param})
    yield flow
    flow.close()


def begun(flow: Flow, name: str) -> Producer:
    producer = Producer(flow.address, transactional_id=f"{flow.topic}-{name}")
    producer.init_transactions()
    producer.begin_transaction()
    return producer


def void(flow: Flow, producer: Producer, count: int) -> None:
    """Send records that must never be seen, by a transaction that is to be aborted."""
    keys = pa.array([f"key-{number % KEYS}" for number in range(count)])
    producer.send_arrow(flow.topic, pa.table({"key": keys, "value": pa.array(["-1"] * count)}))
    producer.flush()


def through_resizes(flow: Flow) -> Iterator[None]:
    """Records in transactions of either end that are open during resizes, with a look after each step."""
    flow.send(200)
    yield
    with begun(flow, "committed") as lasting, begun(flow, "aborted") as aborted:
        void(flow, aborted, 100)
        flow.send(200, lasting)
        void(flow, aborted, 100)
        yield
        flow.resize(5)
        flow.send(200)
        yield
        lasting.commit_transaction()
        yield
        aborted.abort_transaction()
        yield
    with begun(flow, "retired") as retired:
        void(flow, retired, 150)
        flow.resize(3)
        flow.send(200)
        yield
        retired.abort_transaction()
    flow.send(200)
    yield


@pytest.mark.parametrize("options", [{}, {"split": "offset"}, {"minPartitions": "7"}], ids=["key", "offset", "ranges"])
def test_a_stream_holds_back_what_waits_for_a_transaction_and_never_sees_what_is_aborted(
    address: str, flow: Flow, options: dict[str, str], tmp_path: Path
) -> None:
    plans = tmp_path / "plans"
    stream, seen = MicroBatches(address, flow.topic, planLog=str(plans), **options), []
    for _ in through_resizes(flow):
        keys = stream.all_available()
        assert all(keys[key] == expected[: len(keys[key])] for key, expected in flow.expected().items())
        seen.append(sum(map(len, keys.values())))
    stream.close()
    assert stream.keys == flow.expected()
    # Of each key nothing while one transaction is open, whatever follows it in other partitions; then all at once.
    assert seen == [200, 200, 200, 200, 600, 600, 1000]
    found = verify_history(plans.read_text().splitlines())
    assert (found.plans, found.problems) == (stream.batches, ())


def test_a_batch_ends_where_the_first_transaction_is_open_and_counts_none_that_was_aborted(
    address: str, flow: Flow
) -> None:
    for minimum in ("1", "7"):
        for _ in through_resizes(flow):
            keys = batch_read(address, flow.topic, minPartitions=minimum)
            assert all(-1 not in values for values in keys.values())
        assert keys == flow.expected()
        everything = batch_read(address, flow.topic, minPartitions=minimum, **UNCOMMITTED)
        void_count = sum(values.count(-1) for values in everything.values())
        assert void_count == (350 if minimum == "1" else 700)


def test_a_stream_of_uncommitted_records_that_turns_to_committed_ones_reads_none_twice_and_loses_none(
    address: str, flow: Flow, tmp_path: Path
) -> None:
    before = MicroBatches(address, flow.topic, planLog=str(tmp_path / "plans"), **UNCOMMITTED)
    flow.send(200)
    with begun(flow, "open") as producer:
        flow.send(200, producer)
        assert before.all_available() == flow.expected()
        after = MicroBatches(address, flow.topic, before.offset, planLog=str(tmp_path / "plans"))
        assert after.all_available() == {}
        producer.commit_transaction()
    flow.send(200)
    for key, values in after.all_available().items():
        before.keys[key] += values
    assert before.keys == flow.expected()
    assert verify_history((tmp_path / "plans").read_text().splitlines()).problems == ()
    before.close()
    after.close()


def test_a_position_beyond_the_log_is_a_loss_with_an_open_transaction_too(address: str, flow: Flow) -> None:
    flow.send(200)
    with begun(flow, "open") as producer:
        flow.send(200, producer)
        stream = MicroBatches(address, flow.topic, **UNCOMMITTED)
        stream.all_available()
        stream.close()
        stream.offset[flow.topic]["offsets"]["0"] += 1_000
        late = MicroBatches(address, flow.topic, stream.offset)
        with pytest.raises(DataLossError, match=f"{flow.topic}-0: wanted offset 1.* the log ends before"):
            late.step()
        late.close()
        producer.abort_transaction()
