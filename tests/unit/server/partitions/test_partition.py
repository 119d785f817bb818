"""A partition at its leader: appends are folded and told to watchers, producers outlive records and restarts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.records.batch import TRANSACTIONAL, end_transaction_marker, parse_header
from anabranch.server.partitions.partition import Partition, fold_producers
from anabranch.storage.interface import OfflineLogError
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_batch
from tests.support.replicas import NOW_MS, LocalReplicas
from tests.support.snapshots import snapshots_of


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalReplicas]:
    made = LocalReplicas(tmp_path)
    made.resize(1)
    yield made
    made.close()


def append(partition: Partition, sequence: int = -1, *, transactional: bool = False) -> int:
    identity = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence} if sequence >= 0 else {}
    data = make_batch(2, attributes=TRANSACTIONAL if transactional else 0, **identity)
    return partition.append(data, parse_header(data), NOW_MS).base_offset


def finish(partition: Partition, *, commit: bool) -> None:
    marker = end_transaction_marker(7, 0, commit=commit, coordinator_epoch=3, timestamp_ms=NOW_MS)
    partition.append(marker, parse_header(marker), NOW_MS)


def test_an_append_is_folded_at_the_offset_that_it_was_given(local: LocalReplicas) -> None:
    partition = local[0]
    append(partition)
    assert append(partition, 0) == 2
    known = partition.table.known(7)
    assert known is not None
    assert [(batch.base_offset, batch.last_offset) for batch in known.batches] == [(2, 3)]
    assert len(partition.table) == 1, "a batch without a producer leaves no trace"


def test_what_is_folded_live_is_what_a_restart_folds(local: LocalReplicas) -> None:
    partition = local[0]
    for sequence in (0, 2, 4):
        append(partition, sequence, transactional=True)
    finish(partition, commit=False)
    append(partition, 6, transactional=True)
    assert fold_producers(partition.log, NOW_MS) == (partition.table, 0)
    partition.snapshot()
    append(partition, 8, transactional=True)
    table, start = fold_producers(partition.log, NOW_MS)
    assert (table, start) == (partition.table, 9), "from the snapshot on"
    assert [line.first_offset for line in table.aborted] == [0]


def test_readers_of_committed_records_stop_where_a_transaction_is_open(local: LocalReplicas) -> None:
    partition = local[0]
    append(partition)
    append(partition, 0, transactional=True)
    assert partition.last_stable_offset == 2
    finish(partition, commit=True)
    assert partition.last_stable_offset == 5


def test_watchers_are_called_after_every_change_until_they_watch_no_more(local: LocalReplicas) -> None:
    partition = local[0]
    ends: list[int] = []

    def watcher() -> None:
        ends.append(partition.log.end)

    partition.watch(watcher)
    append(partition)
    local.resize(1)
    partition.unwatch(watcher)
    append(partition)
    assert ends == [2, 2, 2], "the append, the role, and the sync of the end of its segment"


def test_a_watcher_may_stop_watching_while_it_is_called(local: LocalReplicas) -> None:
    partition = local[0]
    called: list[str] = []

    def once() -> None:
        called.append("once")
        partition.unwatch(once)

    partition.watch(once)
    partition.watch(lambda: called.append("always"))
    partition.changed()
    partition.changed()
    assert called == ["once", "always", "always"]


def test_where_records_are_synced_first_watchers_are_called_after_the_sync(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path, durability="fsync")
    local.resize(1)
    marks: list[int] = []
    local[0].watch(lambda: marks.append(local[0].log.high_watermark))
    append(local[0])
    assert marks == []
    local.sync(0)
    assert marks == [2]
    local.close()


def test_producers_outlive_the_records_that_tell_of_them(local: LocalReplicas) -> None:
    partition = local[0]
    append(partition, 0)
    partition.log.delete_before(2)
    table, _ = fold_producers(partition.log, NOW_MS)
    assert table.known(7) is not None


def test_a_snapshot_is_taken_only_where_something_is_new(local: LocalReplicas) -> None:
    partition = local[0]
    append(partition, 0)
    partition.snapshot()
    assert [offset for offset, _ in snapshots_of(partition.log)] == [2]
    assert partition.snapshot_end == 2
    partition.log.write_snapshot(b"not written again")
    partition.snapshot()
    assert [data for _, data in snapshots_of(partition.log)] == [b"not written again"]


def kept_aside(partition: Partition) -> list[str]:
    assert isinstance(partition.log, LocalLog)
    return sorted(path.name for path in partition.log.directory.glob("*.damaged"))


def test_a_damaged_snapshot_is_kept_aside_and_the_log_folded(
    local: LocalReplicas, caplog: pytest.LogCaptureFixture
) -> None:
    partition = local[0]
    append(partition, 0)
    partition.log.write_snapshot(b"damaged")
    assert fold_producers(partition.log, NOW_MS) == (partition.table, 0)
    assert kept_aside(partition) == [f"{2:020d}.snapshot.damaged"]
    assert kept_aside(partition)[0] in caplog.text
    append(partition, 2)
    partition.snapshot()
    assert kept_aside(partition) == [f"{2:020d}.snapshot.damaged"], "it was removed, or is taken for a snapshot"
    assert fold_producers(partition.log, NOW_MS) == (partition.table, 4)


def test_every_flipped_bit_of_the_only_snapshot_of_deleted_records_is_noticed(local: LocalReplicas) -> None:
    """The producer was forgotten, and what it repeated was appended twice."""
    partition = local[0]
    append(partition, 0)
    append(partition)
    partition.log.delete_before(2)
    ((end, sound),) = snapshots_of(partition.log)
    for bit in range(8 * len(sound)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        partition.log.write_snapshot(bytes(data))
        with pytest.raises(OfflineLogError, match=rf"{end:020d}\.snapshot: .*anabranch repair"):
            fold_producers(partition.log, NOW_MS)
        assert snapshots_of(partition.log) == [(end, bytes(data))], "it was not left as it was found"
    partition.log.write_snapshot(sound)
    assert fold_producers(partition.log, NOW_MS) == (partition.table, end)


def test_an_older_snapshot_that_reaches_the_start_of_the_log_will_do(local: LocalReplicas) -> None:
    partition = local[0]
    append(partition, 0)
    partition.log.flush()
    partition.log.delete_before(2)
    append(partition, 2)
    partition.log.write_snapshot(b"damaged")
    assert fold_producers(partition.log, NOW_MS) == (partition.table, 2)
    assert kept_aside(partition) == [f"{4:020d}.snapshot.damaged"]


def test_an_older_snapshot_from_before_the_start_of_the_log_will_not_do(local: LocalReplicas) -> None:
    partition = local[0]
    append(partition, 0)
    partition.snapshot()
    append(partition, 2)
    partition.log.flush()
    partition.log.write_snapshot(b"sound in its name only")
    partition.log.delete_before(4)
    assert [end for end, _ in snapshots_of(partition.log)] == [4, 2]
    with pytest.raises(OfflineLogError, match=f"{4:020d}"):
        fold_producers(partition.log, NOW_MS)
    assert not kept_aside(partition)


def test_a_partition_whose_producers_are_lost_as_its_log_is_cut_is_offline(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path, durability="fsync")
    local.resize(1)
    partition = local[0]
    append(partition, 0)
    local.sync(0)
    partition.log.delete_before(2)
    partition.log.write_snapshot(b"damaged")
    append(partition, 2)
    local.disk.broken = True
    with pytest.raises(OSError, match="Input/output error"):
        local.sync(0)
    local.disk.broken = False
    partition.log.resume(NOW_MS + 10_000)
    assert partition.unavailable() is ErrorCode.KAFKA_STORAGE_ERROR
    assert f"{2:020d}.snapshot" in (partition.offline_reason or "")
    assert not len(partition.table), "the batch that was cut would be taken for appended"
    local.close()


def test_requests_hear_why_a_partition_cannot_be_used(local: LocalReplicas) -> None:
    partition = local[0]
    assert partition.unavailable() is ErrorCode.NONE
    assert (partition.leader_epoch, partition.retiring) == (1, False)
    partition.leadership = None
    assert partition.unavailable() is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert (partition.leader_epoch, partition.retiring) == (-1, False)
    partition.take_offline("damaged")
    assert partition.unavailable() is ErrorCode.KAFKA_STORAGE_ERROR


def test_a_disk_that_refuses_again_and_again_is_logged_seldom(
    local: LocalReplicas, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            local[0].storage_failed(OSError(28, "No space left on device"))
    assert len([record for record in caplog.records if "refused by the disk" in record.getMessage()]) == 1


def test_an_append_that_the_disk_refuses_changes_nothing(local: LocalReplicas) -> None:
    partition = local[0]
    local.disk.full = True
    with pytest.raises(OSError, match="No space left"):
        append(partition, 0)
    local.disk.full = False
    assert len(partition.table) == 0
    assert append(partition, 0) == 0
