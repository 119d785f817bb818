"""Produce and Fetch as clients see them, on a real broker: durability, duplicates, limits, waiting, sessions."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from anabranch.records.batch import headers
from anabranch.records.compression import Compression
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch, values_of


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("acks", [-1, 1, 0])
def test_what_is_produced_is_fetched(tmp_path: Path, durability: str, acks: int) -> None:
    with running(tmp_path, durability=durability) as broker, WireClient(broker.port) as client:
        client.create("t")
        for n in range(3):
            asked = client.produce_request("t", 0, batch([b"%d" % n, b"more"]), acks=acks)
            sent = client.send(asked, 9)
            if acks:
                answer = client.receive(sent).responses[0].partition_responses[0]
                assert (answer.error_code, answer.base_offset) == (0, 2 * n)
        deadline = time.monotonic() + 10
        while len(found := client.read_all("t")) < 6:
            assert time.monotonic() < deadline
        assert [value for _, value in found] == [b"0", b"more", b"1", b"more", b"2", b"more"]


def test_what_is_acknowledged_is_visible(tmp_path: Path) -> None:
    """acks=1 was answered before the sync that makes records visible, so its own producer might not find them."""
    with running(tmp_path, durability="fsync") as broker, WireClient(broker.port) as client:
        client.create("seen")
        with WireClient(broker.port) as reader:
            for sent in range(40):
                client.produce("seen", 0, batch([b"value"]), acks=1 if sent % 2 else -1)
                assert reader.offset_at("seen", 0, -1).offset == sent + 1


def test_every_version_of_produce_and_fetch_is_served(client: WireClient) -> None:
    topic_id = client.create("t")
    for n, version in enumerate(range(3, 14)):
        asked = client.produce_request("t" if version < 13 else topic_id, 0, batch([b"v%d" % version]))
        assert client.call(asked, version).responses[0].partition_responses[0].base_offset == n
    for version in range(4, 18):
        asked = client.fetch_request("t" if version < 13 else topic_id, {0: 0})
        answer = client.call(asked, version).responses[0].partitions[0]
        assert len(values_of(answer.records)) == 11


def test_a_repeated_batch_is_answered_with_its_first_offsets(client: WireClient) -> None:
    client.create("t")
    producer = client.producer_id()
    for sequence in range(6):
        assert client.produce("t", 0, batch([b"x"], producer=(producer, 0, sequence))).base_offset == sequence
    for sequence in (5, 1, 3):
        assert client.produce("t", 0, batch([b"x"], producer=(producer, 0, sequence))).base_offset == sequence
    answer = client.produce("t", 0, batch([b"x"], producer=(producer, 0, 9)))
    assert answer.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.fetch("t").high_watermark == 6


def test_duplicates_are_known_after_a_kill_and_after_a_clean_stop(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    with WireClient(broker.port) as client:
        client.create("t")
        producer = client.producer_id()
        for sequence in range(4):
            client.produce("t", 0, batch([b"%d" % sequence], producer=(producer, 0, sequence)))
    for end in (broker.kill, broker.stop):
        end()
        broker.start()
        with WireClient(broker.port) as client:
            assert client.produce("t", 0, batch([b"3"], producer=(producer, 0, 3))).base_offset == 3
            assert client.produce("t", 0, batch([b"9"], producer=(producer, 0, 9))).error_code == 45
            assert [value for _, value in client.read_all("t")] == [b"0", b"1", b"2", b"3"]
            assert client.producer_id() > producer
    broker.stop()


def test_a_count_that_is_not_the_topics_is_refused_but_a_duplicate_is_answered(client: WireClient) -> None:
    client.create("t", 2)
    producer = client.producer_id()
    first = batch([b"a"], producer=(producer, 0, 0))
    assert client.produce("t", 1, first, count=2).base_offset == 0
    assert client.resize("t", 4) is ErrorCode.NONE
    assert client.produce("t", 1, first, count=2).base_offset == 0
    second = batch([b"b"], producer=(producer, 0, 1))
    assert client.produce("t", 1, second, count=2).error_code == ErrorCode.INVALID_PARTITION_METADATA
    assert client.produce("t", 1, second, count=4).base_offset == 1
    assert client.produce("t", 1, batch([b"c"])).base_offset == 2


def test_a_stock_producer_is_redirected_from_a_retiring_partition_and_its_sequence_holds(client: WireClient) -> None:
    client.create("t", 1)
    assert client.resize("t", 2) is ErrorCode.NONE
    producer = client.producer_id()
    stays = [batch([b"s%d" % n], producer=(producer, 0, n)) for n in range(3)]
    moves = [batch([b"m%d" % n], producer=(producer, 0, n)) for n in range(4)]
    assert client.produce("t", 0, stays[0]).base_offset == 0
    assert client.produce("t", 1, moves[0]).base_offset == 0
    assert client.resize("t", 1) is ErrorCode.NONE
    assert client.produce("t", 1, moves[1]).base_offset == 1
    assert client.produce("t", 0, stays[1]).base_offset == 2
    assert client.produce("t", 1, moves[1]).base_offset == 1
    assert client.produce("t", 1, moves[0]).base_offset == 0
    assert client.produce("t", 1, moves[3]).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.resize("t", 2) is ErrorCode.NONE
    assert client.produce("t", 1, moves[1]).base_offset == 1
    assert client.produce("t", 1, moves[2]).base_offset == 1
    assert [value for _, value in client.read_all("t", 0)] == [b"s0", b"m1", b"s1"]
    assert [value for _, value in client.read_all("t", 1)] == [b"m0", b"m2"]


def test_a_stock_producer_is_redirected_from_a_partition_that_is_removed_and_its_sequence_holds(
    client: WireClient,
) -> None:
    client.create("t", 1)
    assert client.resize("t", 2) is ErrorCode.NONE
    assert client.resize("t", 1) is ErrorCode.NONE
    client.until_partitions("t", 1)
    producer = client.producer_id()
    moves = [batch([b"m%d" % n], producer=(producer, 0, n)) for n in range(4)]
    assert client.produce("t", 1, moves[0]).base_offset == 0
    assert client.produce("t", 0, batch([b"s"], producer=(producer, 0, 0))).base_offset == 1
    assert client.produce("t", 1, batch([b"x"])).base_offset == 2
    assert client.produce("t", 1, moves[1]).base_offset == 3
    assert client.produce("t", 1, moves[0]).base_offset == 0
    assert client.produce("t", 1, moves[3]).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert client.produce("t", 1, moves[2], count=2).error_code == ErrorCode.INVALID_PARTITION_METADATA
    assert client.produce("t", 2, moves[2]).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert client.resize("t", 2) is ErrorCode.NONE
    assert client.produce("t", 1, moves[1]).base_offset == 3
    assert client.produce("t", 1, moves[2]).base_offset == 0
    assert [value for _, value in client.read_all("t", 0)] == [b"m0", b"s", b"x", b"m1"]
    assert [value for _, value in client.read_all("t", 1)] == [b"m2"]


def test_log_append_time_and_recompression_follow_the_topics_configs(client: WireClient) -> None:
    client.create("t", message_timestamp_type="LogAppendTime", compression_type="zstd")
    before = int(time.time() * 1000)
    answer = client.produce("t", 0, batch([b"x" * 1000] * 3))
    assert before <= answer.log_append_time_ms <= int(time.time() * 1000)
    ((_, header),) = headers(bytes(client.fetch("t").records))
    assert (header.compression, header.log_append_time) == (Compression.ZSTD, True)
    assert header.max_timestamp == answer.log_append_time_ms


def test_configs_are_changed_live(client: WireClient) -> None:
    client.create("t")
    large = batch([b"x" * 5000])
    assert client.produce("t", 0, large).error_code == ErrorCode.NONE
    change = AlterableConfig(name="max.message.bytes", config_operation=0, value="1000")
    resource = AlterConfigsResource(resource_type=2, resource_name="t", configs=[change])
    (answer,) = client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses
    assert answer.error_code == ErrorCode.NONE
    deadline = time.monotonic() + 5
    while client.produce("t", 0, large).error_code != ErrorCode.MESSAGE_TOO_LARGE:
        assert time.monotonic() < deadline
    asked = DescribeConfigsResource(resource_type=2, resource_name="t", configuration_keys=["max.message.bytes"])
    (described,) = client.call(DescribeConfigsRequest(resources=[asked])).results
    assert [(it.name, it.value, it.config_source) for it in described.configs] == [("max.message.bytes", "1000", 1)]
    wrong = AlterableConfig(name="max.mesage.bytes", config_operation=0, value="1000")
    resource = AlterConfigsResource(resource_type=2, resource_name="t", configs=[wrong])
    (answer,) = client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses
    assert answer.error_code == ErrorCode.INVALID_CONFIG
    assert "Did you mean 'max.message.bytes'?" in answer.error_message


# -- fetching --------------------------------------------------------------------------------------------------------


def test_a_fetch_waits_exactly_as_long_as_it_may(client: WireClient) -> None:
    client.create("t")
    for wait_ms in (0, 150, 400):
        began = time.monotonic()
        assert client.fetch("t", wait_ms=wait_ms).error_code == ErrorCode.NONE
        assert wait_ms <= (time.monotonic() - began) * 1000 + 2 < wait_ms + 2_000


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_waiting_fetch_is_answered_as_soon_as_there_is_enough(tmp_path: Path, durability: str) -> None:
    with running(tmp_path, durability=durability) as broker, WireClient(broker.port) as client:
        client.create("t", 2)
        sent = client.send(client.fetch_request("t", {0: 0, 1: 0}, wait_ms=10_000, min_bytes=3_000), 12)
        began = time.monotonic()
        with WireClient(broker.port) as producer:
            for n in range(3):
                time.sleep(0.1)
                producer.produce("t", n % 2, batch([b"x" * 1000]))
        answer = client.receive(sent)
        assert 0.25 < time.monotonic() - began < 5
        assert sum(len(it.records) for it in answer.responses[0].partitions) >= 3_000


def test_a_resize_wakes_a_reader_that_says_its_epoch(broker: BrokerProcess, client: WireClient) -> None:
    client.create("t", 1)
    sent = client.send(client.fetch_request("t", {0: 0}, wait_ms=20_000, leader_epoch=0, count=1), 12)
    began = time.monotonic()
    with WireClient(broker.port) as other:
        assert other.resize("t", 2) is ErrorCode.NONE
    answer = client.receive(sent).responses[0].partitions[0]
    assert answer.error_code == ErrorCode.FENCED_LEADER_EPOCH
    assert time.monotonic() - began < 5
    assert client.fetch("t", leader_epoch=9).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH
    assert client.fetch("t", leader_epoch=1, count=1).error_code == ErrorCode.INVALID_PARTITION_METADATA
    assert client.fetch("t", leader_epoch=1, count=2).error_code == ErrorCode.NONE


def test_limits_hold_except_for_the_first_batch(client: WireClient) -> None:
    client.create("t", 3)
    for partition in range(3):
        for _ in range(4):
            client.produce("t", partition, batch([b"x" * 10_000]))
    size = len(batch([b"x" * 10_000]))
    request = client.fetch_request("t", {0: 0, 1: 0, 2: 0}, partition_max_bytes=1, max_bytes=10 * size)
    answer = client.call(request, 12)
    assert [len(it.records) for it in answer.responses[0].partitions] == [size, size, size]
    request = client.fetch_request("t", {0: 0, 1: 0, 2: 0}, max_bytes=1)
    answer = client.call(request, 12)
    assert [len(it.records) for it in answer.responses[0].partitions] == [size, 0, 0]
    request = client.fetch_request("t", {0: 0, 1: 0, 2: 0}, partition_max_bytes=2 * size, max_bytes=3 * size)
    answer = client.call(request, 12)
    assert sum(len(it.records) for it in answer.responses[0].partitions) <= 3 * size


def test_an_offset_within_a_batch_gives_that_batch_and_one_outside_the_log_an_error(client: WireClient) -> None:
    client.create("t")
    client.produce("t", 0, batch([b"a", b"b", b"c"]))
    assert values_of(client.fetch("t", 0, 1).records)[0] == (0, b"a")
    assert client.fetch("t", 0, 3).error_code == ErrorCode.NONE
    assert client.fetch("t", 0, 4).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert client.fetch("t", 9).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_session_is_told_only_what_is_new(client: WireClient) -> None:
    topic_id = client.create("t", 3)
    client.produce("t", 0, batch([b"a"]))
    made = client.call(client.fetch_request(topic_id, {0: 0, 1: 0, 2: 0}, session=(0, 0)), 17)
    assert made.session_id > 0
    assert len(made.responses[0].partitions) == 3
    session = made.session_id
    nothing = client.call(client.fetch_request(topic_id, {0: 1}, session=(session, 1)), 17)
    assert (nothing.error_code, list(nothing.responses)) == (0, [])
    sent = client.send(client.fetch_request(topic_id, {}, session=(session, 2), wait_ms=10_000), 17)
    time.sleep(0.05)
    thread = threading.Thread(target=_produce_later, args=(client.sock.getpeername()[1],))
    thread.start()
    news = client.receive(sent)
    thread.join()
    assert [it.partition_index for it in news.responses[0].partitions] == [2]
    assert client.call(client.fetch_request(topic_id, {}, session=(session, 9)), 17).error_code == 71
    assert client.call(client.fetch_request(topic_id, {}, session=(session + 1, 3)), 17).error_code == 70


def _produce_later(port: int) -> None:
    with WireClient(port) as other:
        other.produce("t", 2, batch([b"new"]))


# -- offsets, epochs, deletion -----------------------------------------------------------------------------------------


def test_offsets_by_time_and_by_end(client: WireClient) -> None:
    client.create("t")
    for timestamp in (1000, 3000, 2000):
        client.produce("t", 0, batch([b"a", b"b"], timestamp=timestamp))
    assert client.offset_at("t", 0, -2).offset == 0
    assert client.offset_at("t", 0, -1).offset == 6
    found = client.offset_at("t", 0, 1500)
    assert (found.offset, found.timestamp) == (2, 3000)
    found = client.offset_at("t", 0, -3)
    assert (found.offset, found.timestamp) == (2, 3000)
    assert client.offset_at("t", 0, 9999).offset == -1
    assert client.offset_at("t", 0, -1, leader_epoch=7).error_code == ErrorCode.UNKNOWN_LEADER_EPOCH


def test_epochs_end_where_a_resize_cut_the_log(client: WireClient) -> None:
    client.create("t", 1)
    client.produce("t", 0, batch([b"a", b"b"]))
    assert client.resize("t", 2) is ErrorCode.NONE
    client.produce("t", 0, batch([b"c"]))
    for epoch, expected in ((0, (0, 2)), (1, (1, 3)), (5, (-1, -1))):
        asked = OffsetForLeaderPartition(partition=0, current_leader_epoch=-1, leader_epoch=epoch)
        request = OffsetForLeaderEpochRequest(
            replica_id=-1, topics=[OffsetForLeaderTopic(topic="t", partitions=[asked])]
        )
        found = client.call(request, 4).topics[0].partitions[0]
        assert (found.leader_epoch, found.end_offset) == expected


def test_deleted_records_are_gone_and_an_emptied_retiring_partition_is_removed(client: WireClient) -> None:
    client.create("t", 1)
    assert client.resize("t", 2) is ErrorCode.NONE
    client.produce("t", 1, batch([b"a", b"b"]), count=2)
    assert client.resize("t", 1) is ErrorCode.NONE
    shown = client.metadata("t")
    assert [it.retiring for it in shown.partitions] == [False, True]
    assert [it.count for it in shown.layouts] == [1, 2, 1]
    assert client.delete_everything("t", 1) == 2
    client.until_partitions("t", 1)
    assert client.resize("t", 2) is ErrorCode.NONE
    assert client.produce("t", 1, batch([b"c"]), count=2).base_offset == 2


def test_topics_are_created_on_demand_only_where_that_is_wanted(client: WireClient) -> None:
    asked = MetadataRequest(topics=[MetadataRequestTopic(name="wanted")], allow_auto_topic_creation=True)
    (found,) = client.call(asked, 12).topics
    assert (found.error_code, len(found.partitions)) == (0, 1)
    assert client.metadata("unwanted").error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    bad = MetadataRequest(topics=[MetadataRequestTopic(name="not a name")], allow_auto_topic_creation=True)
    assert client.call(bad, 12).topics[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_going_below_the_initial_count_is_refused(client: WireClient) -> None:
    client.create("t", 3)
    assert client.resize("t", 2) is ErrorCode.INVALID_PARTITIONS
    assert client.resize("t", 3) is ErrorCode.INVALID_PARTITIONS
    assert client.resize("absent", 3) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
