"""The shell around the decision: partitions are found, refusals remembered, batches rewritten, answers durable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, TopicPartition
from anabranch.machines.partition.producers import PRODUCER_SIZE, redirected
from anabranch.records.batch import LOG_APPEND_TIME, TRANSACTIONAL, BatchHeader, headers, parse_header
from anabranch.records.compression import Compression
from anabranch.server.partitions.appending import Appender, Produced
from tests.support.batches import make_keyed_batch, make_sound_batch
from tests.support.replicas import NOW_MS, TOPIC, LocalReplicas

OK = ErrorCode.NONE
GAP = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalReplicas]:
    made = LocalReplicas(tmp_path)
    made.resize(1)
    yield made
    made.close()


def batch(sequence: int = -1, *, epoch: int = 0, producer: int = 7, transactional: bool = False) -> bytearray:
    identity = {"producer_id": producer, "producer_epoch": epoch, "base_sequence": sequence} if sequence >= 0 else {}
    return make_sound_batch(timestamp=NOW_MS, attributes=TRANSACTIONAL if transactional else 0, **identity)


class Coordinator:
    """Says of every transaction the same."""

    def __init__(self, answer: ErrorCode) -> None:
        self.answer = answer
        self.asked: list[tuple[TopicPartition, int, int]] = []

    def __call__(self, partition: TopicPartition, producer_id: int, producer_epoch: int) -> ErrorCode:
        self.asked.append((partition, producer_id, producer_epoch))
        return self.answer


def produce(
    local: LocalReplicas,
    number: int,
    data: bytes | bytearray,
    count: int = COUNT_NOT_SAID,
    coordinator: Coordinator | None = None,
) -> Produced:
    replicas = local.replicas
    partition = replicas.get(TOPIC, number) or replicas.removed_partition(local.name(number))
    appender = Appender(replicas, local.clock.ms) if coordinator is None else Appender(replicas, NOW_MS, coordinator)
    return appender.produce(partition, memoryview(bytearray(data)), count)


def log(local: LocalReplicas, number: int) -> list[BatchHeader]:
    partition = local[number]
    found = partition.log.read(partition.log.log_start, 1 << 20, end=partition.log.end)
    return [] if found is None else [header for _, header in headers(found.view())]


def test_a_batch_is_appended_and_its_repetition_answered_as_it_was(local: LocalReplicas) -> None:
    assert produce(local, 0, batch(0)) == Produced(OK, 0)
    assert produce(local, 0, batch(1), 1) == Produced(OK, 1)
    assert produce(local, 0, batch(1), 5) == Produced(OK, 1)
    assert produce(local, 0, batch(2), 5).error is ErrorCode.INVALID_PARTITION_METADATA
    assert produce(local, 0, batch(4), 1).error is GAP
    assert local[0].log.end == 2


def test_a_producer_that_is_new_to_a_log_counts_as_memory_once(local: LocalReplicas) -> None:
    budget = local.replicas.producers
    held = [budget.size]
    for data in (batch(), batch(0), batch(1), batch(1), batch(7), batch(0, producer=8)):
        produce(local, 0, data)
        held.append(budget.size)
    assert held == [count * PRODUCER_SIZE for count in (0, 0, 1, 1, 1, 1, 2)]


def test_of_several_batches_those_before_a_refused_one_are_appended(local: LocalReplicas) -> None:
    assert produce(local, 0, batch(0) + batch(1)) == Produced(OK, 0)
    assert produce(local, 0, batch(2) + batch(9)).error is GAP
    assert produce(local, 0, batch() + b"?").error is ErrorCode.CORRUPT_MESSAGE
    assert local[0].log.end == 3


def test_what_a_count_refused_is_remembered(local: LocalReplicas) -> None:
    assert produce(local, 0, batch(5), 9).error is ErrorCode.INVALID_PARTITION_METADATA
    assert produce(local, 0, batch(6), 1).error is GAP, "the refused one must come first"
    assert produce(local, 0, batch(5), 1).error is OK
    assert produce(local, 0, batch(6), 1).error is OK


def test_a_batch_is_redirected_under_another_id_and_nothing_else_of_it_changes(local: LocalReplicas) -> None:
    local.resize(2)
    assert produce(local, 1, batch(0)) == Produced(OK, 0)
    local.resize(1)
    assert produce(local, 1, batch(0)) == Produced(OK, 0), "what it has itself"
    assert produce(local, 1, batch(1)) == Produced(OK, 0), "an offset of the survivor"
    assert produce(local, 1, batch()) == Produced(OK, 1)
    assert produce(local, 1, batch(1)) == Produced(OK, 0)
    assert [header.producer_id for header in log(local, 0)] == [redirected(7, 1), -1]
    assert log(local, 0)[0]._replace(producer_id=7, crc=0, leader_epoch=-1) == parse_header(batch(1))._replace(crc=0)
    assert local[1].log.end == 1


def test_a_producer_that_may_be_known_to_an_offline_partition_alone_is_refused(local: LocalReplicas) -> None:
    """What was redirected there, and is repeated, would be appended again."""
    local.resize(2)
    local.resize(1)
    assert produce(local, 1, batch(0)).error is OK
    assert [header.producer_id for header in log(local, 0)] == [redirected(7, 1)]
    local.resize(2)
    local[0].take_offline("its log is damaged")
    assert produce(local, 1, batch(0)).error is ErrorCode.KAFKA_STORAGE_ERROR
    assert produce(local, 1, batch()).error is OK, "a batch without a producer is none that is repeated"


def test_until_the_survivor_has_its_role_nothing_is_redirected_and_the_refusal_is_remembered(
    local: LocalReplicas,
) -> None:
    local.resize(2)
    local.resize(1, survivors=False)
    assert produce(local, 1, batch(0)).error is ErrorCode.NOT_LEADER_OR_FOLLOWER
    local.resize(1)
    assert produce(local, 1, batch(1)).error is GAP, "else the first one could never be repeated"
    assert produce(local, 1, batch(0)).error is OK
    assert produce(local, 1, batch(1)).error is OK


def test_to_a_removed_partition_the_same_holds(local: LocalReplicas) -> None:
    local.resize(2)
    assert produce(local, 1, batch(0), 2) == Produced(OK, 0)
    local.resize(1)
    local.remove(1)
    assert produce(local, 1, batch(0), 2) == Produced(OK, 0), "it remembers"
    assert produce(local, 1, batch(1), 2).error is ErrorCode.INVALID_PARTITION_METADATA
    assert produce(local, 1, batch(1), 1).error is ErrorCode.INVALID_PARTITION_METADATA, "whatever is said"
    assert produce(local, 1, batch(2)).error is GAP
    assert produce(local, 1, batch(1)) == Produced(OK, 0)
    assert produce(local, 1, batch(1)) == Produced(OK, 0)
    assert produce(local, 1, batch()) == Produced(OK, 1)
    assert [header.producer_id for header in log(local, 0)] == [redirected(7, 1), -1]


def test_where_nothing_is_known_of_a_removed_partition_another_leader_may(local: LocalReplicas) -> None:
    local[0].leadership = None
    assert produce(local, 1, batch(0)).error is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert produce(local, 0, batch(0)).error is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_removed_partition_answers_once_its_log_from_before_a_restart_is_read(tmp_path: Path) -> None:
    before = LocalReplicas(tmp_path)
    before.resize(2)
    produce(before, 1, batch(0), 2)
    before.close()
    local = LocalReplicas(tmp_path)
    local.resize(1)
    assert produce(local, 1, batch(0), 2).error is ErrorCode.NOT_LEADER_OR_FOLLOWER, "its log may hold the batch"
    local.remove(1)
    assert produce(local, 1, batch(0), 2) == Produced(OK, 0)
    local.close()


@pytest.mark.parametrize("removed", [False, True], ids=["retiring", "removed"])
def test_what_is_refused_because_the_coordinator_cannot_tell_is_remembered(local: LocalReplicas, removed: bool) -> None:
    local.resize(2)
    local.resize(1)
    if removed:
        local.remove(1)
    loading, ready = Coordinator(ErrorCode.NOT_ENOUGH_REPLICAS), Coordinator(OK)
    first, second = batch(0, transactional=True), batch(1, transactional=True)
    assert produce(local, 1, first, coordinator=loading).error is ErrorCode.NOT_ENOUGH_REPLICAS
    assert produce(local, 1, second, coordinator=ready).error is GAP
    assert produce(local, 1, first, coordinator=ready).error is OK
    assert produce(local, 1, second, coordinator=ready).error is OK
    assert ready.asked == [(local.name(1), 7, 0)], "once for a transaction"
    assert [header.is_transactional for header in log(local, 0)] == [True, True]


def test_a_batch_of_no_transaction_is_refused_and_not_expected_again(local: LocalReplicas) -> None:
    first, second = batch(0, transactional=True), batch(1)
    assert produce(local, 0, first).error is ErrorCode.INVALID_TXN_STATE, "the request names none"
    assert produce(local, 0, second).error is OK


@pytest.mark.parametrize("redirect", [False, True])
def test_what_a_full_disk_refused_comes_first_when_there_is_room(local: LocalReplicas, redirect: bool) -> None:
    local.resize(2)
    if redirect:
        local.resize(1)
    local.disk.full = True
    assert produce(local, 1, batch(3)).error is ErrorCode.KAFKA_STORAGE_ERROR
    local.disk.full = False
    assert produce(local, 1, batch(4)).error is GAP
    assert produce(local, 1, batch(3)).error is OK
    assert produce(local, 1, batch(4)).error is OK


def test_what_was_refused_and_then_redirected_is_not_expected_any_more(local: LocalReplicas) -> None:
    local.resize(2)
    local.resize(1, survivors=False)
    assert produce(local, 1, batch(3)).error is ErrorCode.NOT_LEADER_OR_FOLLOWER
    local.resize(1)
    assert produce(local, 1, batch(3)).error is OK
    assert local[0].table.expire(NOW_MS + 100, 10) == 1
    assert produce(local, 1, batch(9)).error is OK, "a producer that nobody remembers may begin anywhere"


def test_an_answer_waits_for_every_batch_that_is_not_synced(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path, durability="fsync")
    local.resize(1)
    assert produce(local, 0, batch(0)) == Produced(OK, 0, unsynced=(local[0],))
    assert produce(local, 0, batch(0)).unsynced == (local[0],), "the repetition promises as much"
    local.sync(0)
    assert produce(local, 0, batch(0)).unsynced == ()
    assert produce(local, 0, batch(0) + batch(1)) == Produced(OK, 0, unsynced=(local[0],)), "the second is new"
    local.close()


def test_after_a_failed_sync_what_was_cut_is_no_repetition(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path, durability="fsync")
    local.resize(1)
    produce(local, 0, batch(0))
    local.sync(0)
    produce(local, 0, batch(1))
    local.disk.broken = True
    with pytest.raises(OSError, match="Input/output"):
        local.sync(0)
    assert produce(local, 0, batch(1)).error is ErrorCode.KAFKA_STORAGE_ERROR
    local.disk.broken = False
    local.clock.ms += 5_000
    assert produce(local, 0, batch(1)).unsynced == (local[0],)
    assert [header.base_sequence for header in log(local, 0)] == [0, 1]
    local.close()


def test_a_partition_whose_producers_are_lost_as_its_log_is_cut_refuses_as_one_that_is_offline(tmp_path: Path) -> None:
    """Its producers are unknown, which must not be told as an error of theirs."""
    local = LocalReplicas(tmp_path, durability="fsync")
    local.resize(1)
    produce(local, 0, batch(0))
    local.sync(0)
    local[0].log.delete_before(1)
    local[0].log.write_snapshot(b"damaged")
    produce(local, 0, batch(1))
    local.disk.broken = True
    with pytest.raises(OSError, match="Input/output"):
        local.sync(0)
    local.disk.broken = False
    local.clock.ms += 5_000
    assert produce(local, 0, batch(1)).error is ErrorCode.KAFKA_STORAGE_ERROR
    assert local[0].unavailable() is ErrorCode.KAFKA_STORAGE_ERROR
    local.close()


def test_the_topic_decides_how_a_batch_is_compressed_and_stamped(tmp_path: Path) -> None:
    local = LocalReplicas(
        tmp_path, compression_type="zstd", message_timestamp_type="LogAppendTime", max_message_bytes="200"
    )
    local.resize(1)
    sent = make_keyed_batch([(b"k", b"v" * 80)], timestamp=5, producer_id=7, base_sequence=0)
    identity = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
    sent = make_sound_batch(1, bytes(sent[61:]), timestamp=5, **identity)
    assert produce(local, 0, sent) == Produced(OK, 0, NOW_MS)
    local.clock.ms += 1
    assert produce(local, 0, sent) == Produced(OK, 0, NOW_MS), "as it was answered the first time"
    header = log(local, 0)[0]
    assert header.compression is Compression.ZSTD
    assert header.attributes & LOG_APPEND_TIME
    assert header.max_timestamp == NOW_MS
    local.close()
