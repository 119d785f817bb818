"""The offsets of times and of a log's ends, and moving its start."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_LEADER_EPOCH
from anabranch.records.batch import TRANSACTIONAL, parse_header
from anabranch.records.compression import Compression
from anabranch.server.partitions.checks import BatchChecks
from anabranch.server.partitions.offsets import (
    EARLIEST,
    EARLIEST_LOCAL,
    LATEST,
    MAX_TIMESTAMP,
    NOT_FOUND,
    TO_HIGH_WATERMARK,
    ListedOffset,
    delete_records,
    list_offset,
    next_record,
)
from tests.support.batches import make_batch, make_keyed_batch
from tests.support.replicas import NOW_MS, LocalReplicas, delete_while_it_stops

CHECKS = BatchChecks()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalReplicas]:
    made = LocalReplicas(tmp_path)
    made.resize(1)
    yield made
    made.close()


def append(local: LocalReplicas, *timestamps: int, compression: Compression = Compression.NONE) -> None:
    """Append batches of three records, a millisecond apart, from each of these times on."""
    for timestamp in timestamps:
        data = make_keyed_batch([(None, b"v")] * 3, timestamp=timestamp, compression=compression)
        local[0].append(data, parse_header(data), NOW_MS)


def listed(
    local: LocalReplicas, timestamp: int, *, epoch: int = NO_LEADER_EPOCH, committed: bool = False
) -> ListedOffset | ErrorCode:
    return local.runner.run(list_offset(local[0], timestamp, epoch, CHECKS.searches(1), committed=committed))


def deleted(local: LocalReplicas, before: int) -> int | ErrorCode:
    return local.runner.run(delete_records(local[0], before))


def test_a_log_that_cannot_be_read_is_named_once_however_often_clients_ask(
    local: LocalReplicas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append(local, 1_000)
    local.sync(0)

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    for method in ("batch_for_timestamp", "next_record"):
        monkeypatch.setattr(type(local[0].log), method, fail)
    for _ in range(20):
        assert listed(local, 1_001) is ErrorCode.KAFKA_STORAGE_ERROR
        assert local.runner.run(next_record(local[0], 0)) is None
    assert [record.getMessage() for record in caplog.records] == ["timestamps not read"]


def test_an_empty_log_has_ends_and_no_times(local: LocalReplicas) -> None:
    assert listed(local, LATEST) == ListedOffset(-1, 0, 1)
    assert listed(local, EARLIEST) == ListedOffset(-1, 0, 1)
    assert listed(local, 5) == listed(local, MAX_TIMESTAMP) == NOT_FOUND


def test_the_ends_of_a_log(local: LocalReplicas) -> None:
    append(local, 100)
    local.resize(1)
    append(local, 200)
    assert listed(local, LATEST) == ListedOffset(-1, 6, 2)
    assert listed(local, EARLIEST) == listed(local, EARLIEST_LOCAL) == ListedOffset(-1, 0, 1), "the epoch of its record"
    assert deleted(local, 4) == 4
    assert listed(local, EARLIEST) == ListedOffset(-1, 4, 2)


@pytest.mark.parametrize("compression", [Compression.NONE, Compression.ZSTD])
def test_a_time_is_found_within_its_batch(local: LocalReplicas, compression: Compression) -> None:
    append(local, 100, 200, 150, compression=compression)
    assert listed(local, 0) == ListedOffset(100, 0, 1)
    assert listed(local, 102) == ListedOffset(102, 2, 1)
    assert listed(local, 103) == ListedOffset(200, 3, 1)
    assert listed(local, 203) == NOT_FOUND
    assert listed(local, MAX_TIMESTAMP) == ListedOffset(202, 5, 1)
    assert listed(local, -5) == NOT_FOUND, "only tiered storage has that"


def test_deleted_records_are_not_found(local: LocalReplicas) -> None:
    append(local, 100)
    deleted(local, 2)
    assert listed(local, 0) == ListedOffset(102, 2, 1)


def test_readers_of_committed_records_find_nothing_beyond_the_last_stable_offset(local: LocalReplicas) -> None:
    append(local, 100)
    data = make_batch(1, timestamp=200, producer_id=7, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL)
    local[0].append(data, parse_header(data), NOW_MS)
    append(local, 300)
    assert listed(local, LATEST, committed=True) == ListedOffset(-1, 3, 1)
    assert listed(local, 300) == ListedOffset(300, 4, 1)
    assert listed(local, 300, committed=True) == NOT_FOUND


def test_only_a_leader_of_the_readers_epoch_answers(local: LocalReplicas) -> None:
    assert listed(local, LATEST, epoch=0) is ErrorCode.FENCED_LEADER_EPOCH
    assert listed(local, LATEST, epoch=2) is ErrorCode.UNKNOWN_LEADER_EPOCH
    assert listed(local, LATEST, epoch=1) == ListedOffset(-1, 0, 1)
    local[0].leadership = None
    assert listed(local, LATEST) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert deleted(local, 0) is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_the_log_start_moves_forward_and_never_back(local: LocalReplicas) -> None:
    append(local, 100, 200)
    changes: list[int] = []
    local[0].watch(lambda: changes.append(local[0].log.log_start))
    assert deleted(local, 4) == 4
    assert deleted(local, 2) == 4
    assert deleted(local, 0) == 4
    assert deleted(local, TO_HIGH_WATERMARK) == 6
    assert [start for start in changes if start] == [4, 6]


@pytest.mark.parametrize("before", [7, -2])
def test_what_is_not_in_the_log_cannot_be_deleted(local: LocalReplicas, before: int) -> None:
    append(local, 100, 200)
    assert deleted(local, before) is ErrorCode.OFFSET_OUT_OF_RANGE
    assert local[0].log.log_start == 0


def test_a_disk_that_refuses_keeps_the_records(local: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> None:
    append(local, 100)

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local.disk, "replace", refuse)
    assert deleted(local, 2) is ErrorCode.KAFKA_STORAGE_ERROR
    assert local[0].log.log_start == 0


def test_a_deletion_syncs_what_tells_of_producers_without_blocking_the_loop(
    local: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_batch(3, producer_id=7, producer_epoch=0, base_sequence=0)
    local[0].append(data, parse_header(data), NOW_MS)

    def flush() -> None:
        raise AssertionError("this blocks")

    monkeypatch.setattr(local[0].log, "flush", flush)
    assert deleted(local, 2) == 2
    assert local[0].log.flushed == 3
    monkeypatch.undo()
    local.disk.broken = True
    data = make_batch(3, producer_id=7, producer_epoch=0, base_sequence=3)
    local[0].append(data, parse_header(data), NOW_MS)
    assert deleted(local, 4) is ErrorCode.KAFKA_STORAGE_ERROR
    assert local[0].log.log_start == 2


def test_a_replica_that_is_stopped_while_a_deletion_waits_is_left_alone(local: LocalReplicas) -> None:
    partition = local[0]
    data = make_batch(3, producer_id=7, producer_epoch=0, base_sequence=0)
    partition.append(data, parse_header(data), NOW_MS)
    assert local.runner.run(delete_while_it_stops(partition, 2)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert partition.log.log_start == 0


def test_the_next_record_from_a_deleted_offset_is_not_told(local: LocalReplicas) -> None:
    """A reader may have fetched what was there: the log start would say that there was nothing."""
    append(local, 1_000, 2_000)
    local.runner.run(delete_records(local[0], 3))
    assert local.runner.run(next_record(local[0], 2)) is None
    assert local.runner.run(next_record(local[0], 3)) == 3
