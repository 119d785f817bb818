"""The partition log on a real disk: reads, epochs, retention, deletion, damage."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from anabranch.records.batch import headers
from anabranch.runtime.disk import Disk
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import OfflineLogError, OffsetOutOfRangeError, PartitionLog
from tests.support.batches import make_batch

SMALL = LogConfig(durability=Durability.OS, segment_bytes=1_000, index_interval_bytes=100)


def open_log(path: Path, config: LogConfig = SMALL) -> PartitionLog:
    return PartitionLog.open(path / "t-0", config, disk=Disk())


def fill(log: PartitionLog, batches: int, *, records: int = 2, now_ms: int = 0) -> None:
    for index in range(batches):
        log.append(make_batch(records, b"x" * 100, timestamp=1_000 * (index + 1)), 0, now_ms)


def offsets(log: PartitionLog, offset: int, size_max: int = 1 << 20, end: int | None = None) -> list[int]:
    part = log.read(offset, size_max, end=end)
    return [] if part is None else [header.base_offset for _, header in headers(part.view())]


def test_a_read_in_the_middle_of_a_batch_returns_that_batch(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 3)
    assert offsets(log, 3) == [2, 4]


def test_a_read_gives_at_least_one_batch_and_otherwise_stays_within_its_size(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 5)
    assert offsets(log, 0, size_max=1) == [0]
    assert offsets(log, 0, size_max=2 * 161) == [0, 2]
    assert offsets(log, 0, size_max=2 * 161 + 100) == [0, 2]


def test_nothing_above_the_given_end_is_read(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    assert offsets(log, 4, end=4) == []
    assert offsets(log, 0, end=4) == [0, 2]
    assert max(offsets(log, 50, end=56)) < 56
    with pytest.raises(OffsetOutOfRangeError):
        log.read(61, 100)
    assert log.read(60, 100) is None


def test_under_fsync_readers_see_what_was_synced(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig())
    fill(log, 2)
    assert (log.high_watermark, offsets(log, 0)) == (0, [])
    log.flush()
    assert (log.high_watermark, offsets(log, 0)) == (4, [0, 2])


def test_a_slice_outlives_its_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 20)
    part = log.read(0, 300)
    log.delete_before(40)
    assert part is not None
    assert [header.base_offset for _, header in headers(part.view())] == [0]
    with pytest.raises(OffsetOutOfRangeError):
        log.read(0, 100)


def test_deleting_moves_the_start_for_good(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 20)
    log.delete_before(13)
    assert log.log_start == 13
    assert offsets(log, 13)[0] == 12
    reopened = open_log(tmp_path)
    assert (reopened.log_start, reopened.end) == (13, 40)
    with pytest.raises(OffsetOutOfRangeError):
        log.delete_before(41)


def test_a_log_that_is_created_again_goes_on_at_its_offset(tmp_path: Path) -> None:
    log = PartitionLog.open(tmp_path / "t-0", SMALL, disk=Disk(), start_offset=700)
    assert (log.log_start, log.end) == (700, 700)
    log.start_epoch(4)
    fill(log, 1)
    assert log.end == 702
    assert log.end_offset_for_epoch(2) == (2, 700)


def test_epochs_answer_as_kafkas_do(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.start_epoch(1)
    fill(log, 2)
    log.start_epoch(2)
    log.start_epoch(5)
    log.append(make_batch(3), 5, 0)
    assert log.epochs.entries == [(1, 0), (5, 4)]
    assert log.end_offset_for_epoch(0) == (0, 0)
    assert log.end_offset_for_epoch(1) == (1, 4)
    assert log.end_offset_for_epoch(4) == (1, 4)
    assert log.end_offset_for_epoch(5) == (5, 7)
    assert log.end_offset_for_epoch(6) == (-1, -1)
    log.close()
    assert open_log(tmp_path).epochs.entries == [(1, 0), (5, 4)]


def test_retention_by_time_drops_old_segments_even_the_active_one(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig(durability=Durability.OS, segment_bytes=1_000, retention_ms=5_000))
    fill(log, 20)
    assert log.retain(now_ms=12_000) > 0
    assert 0 < log.log_start <= 14
    assert log.retain(now_ms=1_000_000) > 0
    assert log.log_start == log.end == 40
    fill(log, 1)
    assert offsets(log, 40) == [40]


def test_retention_by_size_keeps_at_least_that_much(tmp_path: Path) -> None:
    config = LogConfig(durability=Durability.OS, segment_bytes=1_000, retention_ms=-1, retention_bytes=1_500)
    log = open_log(tmp_path, config)
    fill(log, 30)
    log.retain(now_ms=0)
    assert 1_500 <= log.size < 2_500
    assert log.end == 60


def test_the_first_batch_of_a_time_and_the_latest_of_all(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    found = log.batch_for_timestamp(17_500)
    assert found is not None
    assert [header.base_offset for _, header in headers(found.view())] == [34]
    assert log.batch_for_timestamp(30_001) is None
    latest = log.batch_of_max_timestamp()
    assert latest is not None
    assert [header.max_timestamp for _, header in headers(latest.view())] == [30_000]


@pytest.mark.parametrize("damage", ["torn", "flipped", "garbage"])
def test_a_damaged_tail_is_cut_with_a_warning(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    log = open_log(tmp_path, LogConfig(durability=Durability.OS))
    fill(log, 10)
    path = tmp_path / "t-0" / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    if damage == "torn":
        del data[-30:]
    elif damage == "flipped":
        data[-30] ^= 4
    else:
        data += b"\x07" * 500
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        reopened = open_log(tmp_path, LogConfig(durability=Durability.OS))
    assert reopened.end == (20 if damage == "garbage" else 18)
    assert str(path) in caplog.text
    assert f"position {1610 if damage == 'garbage' else 1449}" in caplog.text
    fill(reopened, 1)
    assert offsets(reopened, 0)[-1] == reopened.end - 2


def test_damage_below_the_recovery_point_is_never_cut(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig(durability=Durability.OS))
    fill(log, 10)
    log.close()
    path = tmp_path / "t-0" / f"{0:020d}.log"
    data = path.read_bytes()
    path.write_bytes(data[:500])
    with pytest.raises(OfflineLogError, match="restore"):
        open_log(tmp_path)
    assert path.read_bytes() == data[:500]


def test_a_lost_or_foreign_index_is_rebuilt(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    log.close()
    for number, path in enumerate(sorted((tmp_path / "t-0").glob("*.index"))):
        if number % 2:
            path.unlink()
        else:
            path.write_bytes(b"no index" * 9)
    reopened = open_log(tmp_path)
    assert reopened.end == 60
    assert offsets(reopened, 33)[0] == 32
    assert reopened.batch_for_timestamp(17_500) is not None


def test_concurrent_commits_share_syncs(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig())

    async def producers() -> int:
        group = GroupCommit()

        async def produce() -> None:
            for _ in range(5):
                appended = log.append(make_batch(1), 0, 0)
                await group.commit(log)
                assert log.flushed > appended.last_offset

        await asyncio.gather(*(produce() for _ in range(20)))
        await group.drain()
        group.close()
        return group.syncs

    assert asyncio.run(producers()) < 30
    assert log.flushed == 100


def test_a_failed_sync_fails_all_who_wait_and_the_log_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path, LogConfig())
    fill(log, 1)
    log.flush()
    cut: list[int] = []
    log.on_truncate = cut.append

    async def fail() -> list[BaseException | None]:
        group = GroupCommit()
        with monkeypatch.context() as patch:
            patch.setattr("os.fdatasync", _refuse)
            fill(log, 1)
            one = group.commit(log)
            await asyncio.sleep(0)
            fill(log, 1)
            two = group.commit(log)
            results = await asyncio.gather(one, two, return_exceptions=True)
        group.close()
        return results

    assert all(isinstance(error, OSError) for error in asyncio.run(fail()))
    fill(log, 1)
    assert cut == [2]
    log.flush()
    assert (log.end, log.flushed) == (4, 4)


def _refuse(fd: int) -> None:
    raise OSError(5, "Input/output error")


def test_snapshots_come_newest_first_and_only_two_are_kept(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for data in (b"one", b"two", b"three"):
        fill(log, 1)
        log.write_snapshot(data)
    assert list(log.snapshots()) == [(6, b"three"), (4, b"two")]
