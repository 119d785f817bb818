"""Transactions on a real broker: what is committed is seen, what is aborted never is, whatever happens in between."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.describe_producers import DescribeProducersRequest, TopicRequest
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from anabranch.protocol.messages.list_transactions import ListTransactionsRequest
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.transactions import UNCOMMITTED, TransactionalProducer, committed, fetch, retried
from tests.support.wire import WireClient, batch, values_of

OK = ErrorCode.NONE


@pytest.fixture
def producer(client: WireClient) -> TransactionalProducer:
    return TransactionalProducer(client).init()


def test_what_is_committed_is_seen_at_once_and_what_is_aborted_never(
    client: WireClient, producer: TransactionalProducer
) -> None:
    client.create("t", 2)
    assert producer.send("t", 0, b"a") is OK
    assert producer.send("t", 1, b"b") is OK
    assert producer.send("t", 0, b"c") is OK
    assert committed(client, "t", 0) == committed(client, "t", 1) == []
    assert [value for _, value in values_of(fetch(client, "t", 0, isolation_level=UNCOMMITTED).records)] == [b"a", b"c"]
    producer.commit()
    assert committed(client, "t", 0) == [b"a", b"c"]
    assert committed(client, "t", 1) == [b"b"]
    producer.send("t", 0, b"void")
    producer.abort()
    producer.send("t", 0, b"d")
    producer.commit()
    assert committed(client, "t", 0) == [b"a", b"c", b"d"]
    answer = fetch(client, "t", 0)
    assert [(line.producer_id, line.first_offset) for line in answer.aborted_transactions] == [
        (producer.producer_id, 3)
    ]
    assert fetch(client, "t", 0, isolation_level=UNCOMMITTED).aborted_transactions is None


def test_readers_of_committed_records_stop_at_the_oldest_open_transaction(client: WireClient) -> None:
    client.create("t")
    one, two = TransactionalProducer(client, "one").init(), TransactionalProducer(client, "two").init()
    one.send("t", 0, b"1")
    two.send("t", 0, b"2")
    client.produce("t", 0, batch([b"plain"]))
    two.commit()
    answer = fetch(client, "t")
    assert (answer.last_stable_offset, answer.high_watermark) == (0, 4)
    assert committed(client, "t") == []
    assert client.offset_at("t", 0, -1, isolation_level=1).offset == 0
    one.abort()
    assert fetch(client, "t").last_stable_offset == 5
    assert committed(client, "t") == [b"2", b"plain"]


def test_only_what_a_fetch_needs_is_said_of_aborted_transactions(
    client: WireClient, producer: TransactionalProducer
) -> None:
    client.create("t")
    for number in range(5):
        producer.send("t", 0, b"%d" % number)
        producer.abort()
    assert [line.first_offset for line in fetch(client, "t").aborted_transactions] == [0, 2, 4, 6, 8]
    assert [line.first_offset for line in fetch(client, "t", offset=5).aborted_transactions] == [4, 6, 8]
    small = client.fetch_request("t", {0: 2}, isolation_level=1, partition_max_bytes=1)
    answer = client.call(small, 12).responses[0].partitions[0]
    assert [line.first_offset for line in answer.aborted_transactions] == [2]
    assert committed(client, "t") == []


def test_a_batch_outside_of_its_transaction_is_refused(client: WireClient, producer: TransactionalProducer) -> None:
    client.create("t", 2)
    assert producer.send("t", 0, b"x", add=False) is ErrorCode.INVALID_TXN_STATE
    assert producer.send("t", 0, b"x", add=False, version=11) is ErrorCode.TRANSACTION_ABORTABLE
    producer.add("t", 0)
    assert producer.send("t", 1, b"x", add=False) is ErrorCode.INVALID_TXN_STATE
    assert producer.send("t", 0, b"x", add=False, name=None) is ErrorCode.INVALID_TXN_STATE
    assert producer.send("t", 0, b"x", add=False, name="other") is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert producer.send("t", 0, b"x") is OK
    assert producer.send("t", 0, b"x", transactional=False) is ErrorCode.INVALID_TXN_STATE
    producer.commit()
    assert producer.send("t", 0, b"late", add=False) is ErrorCode.INVALID_TXN_STATE
    assert committed(client, "t") == [b"x"]


def test_a_transaction_holds_only_partitions_that_exist(client: WireClient, producer: TransactionalProducer) -> None:
    client.create("t")
    assert producer.add("t", 1, 0) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert producer.add("t", 0, 1) is ErrorCode.OPERATION_NOT_ATTEMPTED
    assert producer.add("__transaction_state", 0) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert producer.describe().transaction_state == "Empty"


def test_a_second_producer_fences_the_first(client: WireClient, producer: TransactionalProducer) -> None:
    client.create("t")
    producer.send("t", 0, b"zombie")
    successor = TransactionalProducer(client).init()
    assert (successor.producer_id, successor.epoch) == (producer.producer_id, 2)
    assert producer.send("t", 0, b"late") is ErrorCode.INVALID_PRODUCER_EPOCH
    assert producer.end(commit=True) is ErrorCode.PRODUCER_FENCED
    successor.send("t", 0, b"good")
    successor.commit()
    assert committed(client, "t") == [b"good"]


def test_a_second_producer_fences_the_first_where_that_wrote_nothing(
    client: WireClient, producer: TransactionalProducer
) -> None:
    """The transaction held the partition, which has no marker of its end: what is late is refused all the same."""
    client.create("t")
    assert producer.add("t", 0) is OK
    successor = TransactionalProducer(client).init()
    assert client.offset_at("t", 0, -1).offset == 0
    assert producer.send("t", 0, b"late", add=False) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert successor.add("t", 0) is OK
    assert producer.send("t", 0, b"later", add=False) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert successor.send("t", 0, b"good") is OK
    successor.commit()
    assert producer.send("t", 0, b"latest", add=False) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert successor.send("t", 0, b"of no transaction", add=False) is ErrorCode.INVALID_TXN_STATE
    assert committed(client, "t") == [b"good"]


def test_a_transaction_that_takes_too_long_is_aborted(tmp_path: Path) -> None:
    interval = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": 50}
    with running(tmp_path, **interval) as broker, WireClient(broker.port) as client:
        client.create("t")
        slow = TransactionalProducer(client, timeout_ms=200).init()
        slow.send("t", 0, b"slow")
        client.produce("t", 0, batch([b"plain"]))
        slow.until("CompleteAbort")
        assert committed(client, "t") == [b"plain"]
        assert slow.send("t", 0, b"late") is ErrorCode.INVALID_PRODUCER_EPOCH
        assert slow.end(commit=True) is ErrorCode.PRODUCER_FENCED
        request = InitProducerIdRequest(transactional_id="tx", transaction_timeout_ms=900_001)
        assert client.call(request).error_code == ErrorCode.INVALID_TRANSACTION_TIMEOUT


# Crashes.


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_an_open_transaction_outlives_the_broker(tmp_path: Path, durability: str) -> None:
    broker = BrokerProcess(tmp_path, durability=durability).start()
    try:
        with WireClient(broker.port) as client:
            client.create("t", 2)
            producer = TransactionalProducer(client).init()
            producer.send("t", 0, b"void")
            producer.abort()
            producer.send("t", 0, b"a")
            producer.send("t", 1, b"b")
        broker.kill()
        broker.start()
        with WireClient(broker.port) as client:
            producer.client = client
            assert committed(client, "t", 0) == []
            assert fetch(client, "t", 0).last_stable_offset == 2
            producer.until("Ongoing")
            assert producer.send("t", 0, b"c") is OK
            producer.commit()
            assert committed(client, "t", 0) == [b"a", b"c"]
            assert committed(client, "t", 1) == [b"b"]
        assert broker.stop() == 0
        broker.start()
        with WireClient(broker.port) as client:
            assert committed(client, "t", 0) == [b"a", b"c"]
        assert broker.stop() == 0
    finally:
        if broker.alive:
            broker.kill()


@pytest.mark.parametrize("commit", [True, False])
def test_a_decision_is_carried_out_after_a_kill(tmp_path: Path, commit: bool) -> None:
    """The answer to EndTxn is the promise: what comes after it may be cut short anywhere."""
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    try:
        with WireClient(broker.port) as client:
            client.create("t", 20)
        for round_ in range(4):
            with WireClient(broker.port) as client:
                producer = TransactionalProducer(client).init()
                for partition in range(20):
                    producer.send("t", partition, b"%d" % round_)
                assert producer.end(commit=commit, wait=False) is OK
                time.sleep(0.002 * round_)
            broker.kill()
            broker.start()
        with WireClient(broker.port) as client:
            producer.client = client
            producer.until("CompleteCommit" if commit else "CompleteAbort")
            expected = [b"0", b"1", b"2", b"3"] if commit else []
            for partition in range(20):
                assert committed(client, "t", partition) == expected
        assert broker.stop() == 0
    finally:
        if broker.alive:
            broker.kill()


# Resizes.


def test_a_transaction_spans_an_expansion(client: WireClient, producer: TransactionalProducer) -> None:
    client.create("t", 1)
    producer.send("t", 0, b"before", count=1)
    assert client.resize("t", 2) is OK
    assert producer.send("t", 0, b"refused", count=1) is ErrorCode.INVALID_PARTITION_METADATA
    producer.send("t", 1, b"moved", count=2)
    producer.send("t", 0, b"stayed", count=2)
    assert committed(client, "t", 0) == committed(client, "t", 1) == []
    producer.commit()
    assert committed(client, "t", 0) == [b"before", b"stayed"]
    assert committed(client, "t", 1) == [b"moved"]


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_spans_a_shrink(client: WireClient, producer: TransactionalProducer, commit: bool) -> None:
    """The retiring partition takes the marker, and nothing else; the end of its records does not move."""
    client.create("t", 1)
    client.resize("t", 2)
    client.produce("t", 1, batch([b"plain"]), count=2)
    producer.send("t", 1, b"before", count=2)
    assert client.resize("t", 1) is OK
    ended = client.metadata("t").partitions[1].leader_epoch - 1
    assert client.end_of_epoch("t", 1, ended) == 2
    producer.send("t", 0, b"after", count=1)
    assert committed(client, "t", 1) == [b"plain"]
    assert producer.end(commit=commit) is OK
    assert committed(client, "t", 1) == ([b"plain", b"before"] if commit else [b"plain"])
    assert committed(client, "t", 0) == ([b"after"] if commit else [])
    assert fetch(client, "t", 1).last_stable_offset == 3
    assert client.end_of_epoch("t", 1, ended) == 2, "the marker is no record of the layout that ended"


@pytest.mark.parametrize("commit", [True, False])
def test_a_stock_producers_transaction_is_ended_where_its_batches_were_redirected_to(
    client: WireClient, producer: TransactionalProducer, commit: bool
) -> None:
    client.create("t", 1)
    client.resize("t", 2)
    producer.send("t", 1, b"before")
    client.resize("t", 1)
    producer.send("t", 1, b"redirected")
    producer.send("t", 0, b"own")
    assert committed(client, "t", 0) == []
    assert fetch(client, "t", 0).last_stable_offset == 0
    assert producer.end(commit=commit) is OK
    assert committed(client, "t", 1) == ([b"before"] if commit else [])
    assert committed(client, "t", 0) == ([b"redirected", b"own"] if commit else [])
    producer.send("t", 1, b"next")
    producer.commit()
    assert committed(client, "t", 0) == ([b"redirected", b"own", b"next"] if commit else [b"next"])
    client.resize("t", 2)
    producer.send("t", 1, b"again")
    producer.commit()
    assert committed(client, "t", 1) == ([b"before", b"again"] if commit else [b"again"])


def test_a_transaction_spans_a_shrink_and_a_kill(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    try:
        with WireClient(broker.port) as client:
            client.create("t", 1)
            client.resize("t", 2)
            producer = TransactionalProducer(client).init()
            producer.send("t", 1, b"before")
            client.resize("t", 1)
            producer.send("t", 1, b"redirected")
        broker.kill()
        broker.start()
        with WireClient(broker.port) as client:
            producer.client = client
            assert committed(client, "t", 0) == committed(client, "t", 1) == []
            producer.until("Ongoing")
            producer.commit()
            assert committed(client, "t", 1) == [b"before"]
            assert committed(client, "t", 0) == [b"redirected"]
        assert broker.stop() == 0
    finally:
        if broker.alive:
            broker.kill()


def test_a_retiring_partition_is_removed_only_after_its_transactions(tmp_path: Path) -> None:
    with running(tmp_path, **{"reaper.interval.ms": 20}) as broker, WireClient(broker.port) as client:
        client.create("t", 1)
        client.resize("t", 2)
        producer = TransactionalProducer(client).init()
        producer.send("t", 1, b"deleted")
        client.resize("t", 1)
        client.delete_everything("t", 1)
        time.sleep(0.2)
        assert len(client.metadata("t").partitions) == 2
        producer.commit()
        client.until_partitions("t", 1)
        client.resize("t", 2)
        client.produce("t", 1, batch([b"new"]), count=2)
        assert client.read_all("t", 1, 2) == [(2, b"new")], "offsets go on behind the marker"


@pytest.mark.parametrize("commit", [True, False])
def test_a_stock_producers_transaction_goes_on_where_its_partition_was_removed_and_is_made_again(
    tmp_path: Path, commit: bool
) -> None:
    with running(tmp_path, **{"reaper.interval.ms": 20}) as broker, WireClient(broker.port) as client:
        client.create("t", 1)
        client.resize("t", 2)
        producer = TransactionalProducer(client).init()
        producer.send("t", 1, b"deleted")
        producer.commit()
        client.resize("t", 1)
        client.delete_everything("t", 1)
        client.until_partitions("t", 1)
        producer.send("t", 1, b"redirected")
        client.resize("t", 2)
        producer.send("t", 1, b"there again")
        assert committed(client, "t", 0) == committed(client, "t", 1, 2) == []
        producer.end(commit=commit)
        assert committed(client, "t", 0) == ([b"redirected"] if commit else [])
        assert committed(client, "t", 1, 2) == ([b"there again"] if commit else [])
        assert fetch(client, "t", 1, 2).last_stable_offset == 4, "deleted and its marker, there again and its marker"


def test_the_markers_of_a_deleted_topic_are_not_waited_for(client: WireClient, producer: TransactionalProducer) -> None:
    client.create("gone")
    client.create("t")
    producer.send("gone", 0, b"x")
    producer.send("t", 0, b"y")
    client.delete("gone")
    producer.commit()
    assert committed(client, "t") == [b"y"]


# Seeing it.


def test_transactions_and_producers_are_described(client: WireClient, producer: TransactionalProducer) -> None:
    client.create("t", 2)
    other = TransactionalProducer(client, "other").init()
    producer.send("t", 1, b"a", b"b")
    told = producer.describe()
    assert (told.transaction_state, told.producer_id, told.producer_epoch) == ("Ongoing", producer.producer_id, 0)
    assert [(topic.topic, topic.partitions) for topic in told.topics] == [("t", [1])]
    answer = client.call(DescribeProducersRequest(topics=[TopicRequest(name="t", partition_indexes=[0, 1, 7])]))
    empty, one, missing = answer.topics[0].partitions
    assert (empty.error_code, empty.active_producers) == (OK, [])
    assert missing.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    (active,) = one.active_producers
    assert (active.producer_id, active.last_sequence, active.current_txn_start_offset) == (producer.producer_id, 1, 0)

    def listed(**filters: object) -> dict[str, str]:
        answer = client.call(ListTransactionsRequest(**filters))
        assert answer.error_code == OK
        return {it.transactional_id: it.transaction_state for it in answer.transaction_states}

    assert listed() == {"tx": "Ongoing", "other": "Empty"}
    assert listed(state_filters=["Empty"]) == {"other": "Empty"}
    assert listed(producer_id_filters=[producer.producer_id]) == {"tx": "Ongoing"}
    assert listed(duration_filter=0) == {"tx": "Ongoing"}
    assert listed(duration_filter=60_000) == {}
    assert listed(transactional_id_pattern="oth.*") == {"other": "Empty"}
    for pattern in ("(", "[a-z]" * 201):
        bad = client.call(ListTransactionsRequest(transactional_id_pattern=pattern))
        assert bad.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
    odd = client.call(ListTransactionsRequest(state_filters=["Odd"]))
    assert (odd.unknown_state_filters, odd.transaction_states) == (["Odd"], [])
    other.client.close()


def test_an_operator_ends_a_transaction_by_hand(client: WireClient, producer: TransactionalProducer) -> None:
    client.create("t")
    producer.send("t", 0, b"hanging")
    marker = WritableTxnMarker(
        producer_id=producer.producer_id,
        producer_epoch=0,
        transaction_result=False,
        topics=[WritableTxnMarkerTopic(name="t", partition_indexes=[0])],
        coordinator_epoch=-1,
    )
    answer = client.call(WriteTxnMarkersRequest(markers=[marker]), 1)
    assert answer.markers[0].topics[0].partitions[0].error_code == OK
    client.produce("t", 0, batch([b"plain"]))
    assert committed(client, "t") == [b"plain"]


def test_nobody_fences_a_coordinator_by_hand(client: WireClient, producer: TransactionalProducer) -> None:
    """A marker of the greatest epoch was written, and the coordinator's own markers were refused from then on."""
    client.create("t")
    producer.send("t", 0, b"sent")
    marker = WritableTxnMarker(
        producer_id=producer.producer_id,
        producer_epoch=0,
        transaction_result=False,
        topics=[WritableTxnMarkerTopic(name="t", partition_indexes=[0])],
        coordinator_epoch=2**31 - 1,
    )
    answer = client.call(WriteTxnMarkersRequest(markers=[marker]), 1)
    assert answer.markers[0].topics[0].partitions[0].error_code == ErrorCode.INVALID_REQUEST
    assert producer.end(commit=True) is OK
    producer.send("t", 0, b"sent too")
    assert producer.end(commit=True) is OK
    assert committed(client, "t") == [b"sent", b"sent too"]


@pytest.mark.parametrize("is_open", [True, False])
def test_nobody_fences_a_producer_by_hand(client: WireClient, is_open: bool) -> None:
    """A marker of the greatest epoch was written, and the producer was refused from then on."""
    client.create("t")
    producer_id = client.producer_id()
    if is_open:
        producer = TransactionalProducer(client).init()
        producer.send("t", 0, b"sent")
        producer_id = producer.producer_id
    else:
        assert client.produce("t", 0, batch([b"sent"], producer=(producer_id, 0, 0))).error_code == OK
    end = client.offset_at("t", 0, -1).offset
    for invented in (producer_id, 10**9):
        marker = WritableTxnMarker(
            producer_id=invented,
            producer_epoch=2**15 - 1,
            transaction_result=False,
            topics=[WritableTxnMarkerTopic(name="t", partition_indexes=[0])],
            coordinator_epoch=-1,
        )
        answer = client.call(WriteTxnMarkersRequest(markers=[marker]), 1)
        refused = is_open and invented == producer_id
        error = ErrorCode.INVALID_PRODUCER_EPOCH if refused else OK
        assert answer.markers[0].topics[0].partitions[0].error_code == error
    assert client.offset_at("t", 0, -1).offset == end, "nothing was written"
    if is_open:
        assert producer.end(commit=True) is OK
    else:
        assert client.produce("t", 0, batch([b"more"], producer=(producer_id, 0, 1))).error_code == OK


# Offsets of groups.


def test_a_groups_progress_counts_when_the_transaction_is_committed(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    try:
        with WireClient(broker.port) as client:
            client.create("t")
            producer = TransactionalProducer(client).init()
            client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]), 4)
            assert producer.commit_offset("g", "t", 0, 5) is OK
            assert offset_of(client, "g", "t", 0) == (-1, OK)
            assert offset_of(client, "g", "t", 0, stable=True)[1] is ErrorCode.UNSTABLE_OFFSET_COMMIT
            producer.commit()
            assert offset_of(client, "g", "t", 0, stable=True) == (5, OK)
            producer.commit_offset("g", "t", 0, 9)
            producer.abort()
            assert offset_of(client, "g", "t", 0, stable=True) == (5, OK)
            assert producer.commit_offset("g", "t", 0, 9, add=False) is ErrorCode.TRANSACTION_ABORTABLE
            producer.commit_offset("g", "t", 0, 7)
        broker.kill()
        broker.start()
        with WireClient(broker.port) as client:
            producer.client = client
            producer.until("Ongoing")
            assert offset_of(client, "g", "t", 0) == (5, OK)
            producer.commit()
            assert offset_of(client, "g", "t", 0, stable=True) == (7, OK)
        broker.kill()
        broker.start()
        with WireClient(broker.port) as client:
            assert offset_of(client, "g", "t", 0, stable=True) == (7, OK)
        assert broker.stop() == 0
    finally:
        if broker.alive:
            broker.kill()


def offset_of(
    client: WireClient, group: str, topic: str, partition: int, *, stable: bool = False
) -> tuple[int, ErrorCode]:
    """A group's progress."""
    asked = OffsetFetchRequestGroup(
        group_id=group, topics=[OffsetFetchRequestTopics(name=topic, partition_indexes=[partition])]
    )
    request = OffsetFetchRequest(groups=[asked], require_stable=stable)
    found = retried(lambda: client.call(request, 8).groups[0]).topics[0].partitions[0]
    return found.committed_offset, ErrorCode(found.error_code)


def test_invented_transactional_ids_leave_the_memory_to_those_that_were_there(tmp_path: Path) -> None:
    with running(tmp_path, **{"transaction.metadata.max.bytes": "20000"}) as broker, WireClient(broker.port) as client:
        client.create("t", 100)
        honest = TransactionalProducer(client).init()
        codes = [
            client.call(InitProducerIdRequest(transactional_id=f"invented-{n}", transaction_timeout_ms=1000)).error_code
            for n in range(40)
        ]
        refused = codes.count(ErrorCode.POLICY_VIOLATION)
        assert 10 < refused < 40 and codes.count(OK) == 40 - refused
        assert honest.send("t", 0, b"a") is OK
        honest.commit()
        assert committed(client, "t", 0) == [b"a"]
        assert broker.said("warning", "transaction refused")
        assert broker.metrics()["kafka_server_transaction_coordinator_metrics_metadata_bytes"] <= 20_000


def test_readers_of_small_batches_with_an_aborted_transaction_among_them_hold_nobody_up(tmp_path: Path) -> None:
    """To look at the header of each of 120,000 batches takes 150 ms."""
    small = bytes(batch([b"0123456789"])) * 100
    with running(tmp_path) as broker, WireClient(broker.port, 60) as client:
        client.create("t")
        producer = TransactionalProducer(client).init()
        assert producer.send("t", 0, b"aborted") is ErrorCode.NONE
        for _ in range(1_200):
            assert client.produce("t", 0, small).error_code == ErrorCode.NONE
        producer.abort()
        end = client.offset_at("t", 0, -1).offset
        for first, size_max in [(0, 20 << 20), (0, 5 << 20), (end // 2, 20 << 20)]:
            asked = client.fetch_request("t", {0: first}, partition_max_bytes=size_max, max_bytes=size_max)
            asked.isolation_level = 1
            answer = in_short_steps(broker, lambda asked=asked: client.call(asked, 12))  # type: ignore[misc]
            (found,) = answer.responses[0].partitions
            assert len(found.records) > 4 << 20
            told = [(line.producer_id, line.first_offset) for line in found.aborted_transactions]
            assert told == [(producer.producer_id, 0)]


def test_the_end_of_a_log_right_behind_a_commit_is_behind_its_records(tmp_path: Path) -> None:
    """The markers are written when the commit has been answered; an end told before them hides what was committed."""
    committed_ends = ListOffsetsRequest(
        replica_id=-1,
        isolation_level=1,
        topics=[ListOffsetsTopic(name="t", partitions=[ListOffsetsPartition(partition_index=0, timestamp=-1)])],
    )
    with running(tmp_path) as broker, WireClient(broker.port) as client, WireClient(broker.port) as reader:
        client.create("t")
        producer = TransactionalProducer(client).init()
        early = 0
        for number in range(1, 21):
            assert producer.send("t", 0, b"x") is ErrorCode.NONE
            assert producer.end(commit=True, wait=False) is ErrorCode.NONE
            found = reader.call(committed_ends, 7).topics[0].partitions[0]
            early += found.offset != 2 * number
            producer.until("CompleteCommit")
        assert early < 10
