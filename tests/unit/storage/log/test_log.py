"""The partition log on a real disk: reads, epochs, retention, deletion, damage."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine
from pathlib import Path

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.records.batch import build, headers
from anabranch.runtime.disk import Disk
from anabranch.runtime.syncs import Syncs
from anabranch.storage.directory import DataDirectory
from anabranch.storage.interface import Slice
from anabranch.storage.log import segments
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog, OfflineLogError, OffsetOutOfRangeError
from anabranch.storage.log.segment import HEADERS_AT_A_TIME
from tests.support.batches import make_batch
from tests.support.disks import FaultyDisk
from tests.support.snapshots import snapshots_of

HERE = Path("/data/t-0")
SMALL = LogConfig(durability=Durability.OS, segment_bytes=1_000, index_interval_bytes=100)


class CutNoted:
    """Observes a log, and notes where it is cut."""

    def __init__(self, cut: list[int]) -> None:
        self._cut = cut

    def log_cut(self, end: int) -> None:
        self._cut.append(end)

    def before_delete(self, start: int) -> None:
        pass

    def high_watermark_moved(self) -> None:
        pass


def open_log(path: Path, config: LogConfig = SMALL) -> LocalLog:
    return LocalLog.open(path / "t-0", config, disk=Disk())


def fill(log: LocalLog, batches: int, *, records: int = 2, now_ms: int = 0) -> None:
    for index in range(batches):
        log.append(make_batch(records, b"x" * 100, timestamp=1_000 * (index + 1)), 0, now_ms)


def offsets(log: LocalLog, offset: int, size_max: int = 1 << 20, end: int | None = None) -> list[int]:
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


def test_a_read_passes_over_batches_without_records_in_bounded_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    for _ in range(100):  # In seven segments.
        log.append(build(b"", record_count=0, base_timestamp=0, max_timestamp=0, last_offset_delta=0), 0, 0)
    log.append(make_batch(), 0, 0)
    assert offsets(log, 0) == [100]
    assert offsets(log, 0, end=90)[0] == 89, "the reader moves on"
    monkeypatch.setattr(segments, "EMPTY_BATCHES_PASSED_MAX", 40)
    first = offsets(log, 0)[0]
    assert 30 < first < 40
    assert offsets(log, first + 1)[0] > first + 30


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
    log = LocalLog.open(tmp_path / "t-0", SMALL, disk=Disk(), start_offset=700)
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
    assert isinstance(found, Slice)
    assert [header.base_offset for _, header in headers(found.view())] == [34]
    assert log.batch_for_timestamp(30_001) is None
    latest = log.batch_of_max_timestamp()
    assert isinstance(latest, Slice)
    assert [header.max_timestamp for _, header in headers(latest.view())] == [30_000]


def test_a_search_by_time_passes_over_deleted_records_at_once_and_looks_at_few_headers_at_a_time(
    tmp_path: Path,
) -> None:
    """A deleted record in the middle of a file may have the largest timestamp of it."""

    async def scenario() -> None:
        log = open_log(tmp_path, LogConfig(segment_bytes=1 << 30))
        log.append(make_batch(1, b"x", timestamp=9_000_000), 0, 0)
        for number in range(1, 3 * HEADERS_AT_A_TIME):
            log.append(make_batch(1, b"x", timestamp=number), 0, 0)
        log.append(make_batch(1, b"x", timestamp=8_000_000), 0, 0)
        log.flush()
        log.delete_before(1)
        search = log.batch_for_timestamp(7_000_000)
        assert isinstance(search, Coroutine)
        steps = 0
        task = asyncio.create_task(search)
        while not task.done():
            await asyncio.sleep(0)
            steps += 1
        assert 2 <= steps <= 6
        found = task.result()
        assert isinstance(found, Slice)
        assert [header.base_offset for _, header in headers(found.view())] == [3 * HEADERS_AT_A_TIME]
        log.delete_before(2 * HEADERS_AT_A_TIME)
        found = log.batch_for_timestamp(0)
        assert isinstance(found, Slice)
        assert [header.base_offset for _, header in headers(found.view())] == [2 * HEADERS_AT_A_TIME]
        search = log.batch_for_timestamp(8_500_000)
        assert isinstance(search, Coroutine)
        assert await search is None

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["torn", "garbage"])
def test_a_damaged_tail_is_cut_with_a_warning(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    log = open_log(tmp_path, LogConfig(durability=Durability.OS))
    fill(log, 10)
    path = tmp_path / "t-0" / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    if damage == "torn":
        del data[-30:]
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
    log.observe(CutNoted(cut))

    async def fail() -> list[BaseException | None]:
        group = GroupCommit(Syncs(native=False))
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


def test_snapshots_come_newest_first_and_beside_the_newest_the_last_that_is_synced_is_kept(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for data in (b"one", b"two", b"three"):
        fill(log, 1)
        log.flush()
        log.write_snapshot(data)
    assert snapshots_of(log) == [(6, b"three"), (4, b"two")]
    assert log.has_snapshot_from(6)
    for data in (b"four", b"five"):
        fill(log, 1)
        log.write_snapshot(data)
    assert snapshots_of(log) == [(10, b"five"), (6, b"three")]
    assert not log.has_snapshot_from(7)


def test_a_sync_covers_what_was_there_when_it_began_and_nothing_else(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig())
    fill(log, 1)
    first = log.begin_flush()
    fill(log, 1)
    second = log.begin_flush()
    assert first.files == second.files, "the second cannot count on the first"
    second.run()
    log.end_flush(second)
    assert log.flushed == 4
    log.end_flush(first)
    assert log.flushed == 4


def test_a_sync_that_was_under_way_when_the_log_was_cut_promises_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig())
    fill(log, 2)
    flush = log.begin_flush()
    flush.run()
    log.truncate(2)
    fill(log, 1)
    log.end_flush(flush)
    assert (log.end, log.flushed) == (4, 0)
    log.flush()
    assert log.flushed == 4


def test_a_new_logs_first_sync_includes_its_names(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig())
    fill(log, 1)
    assert log.begin_flush().directories == (tmp_path / "t-0", tmp_path)
    log.flush()
    fill(log, 1)
    assert log.begin_flush().directories == ()


@pytest.mark.parametrize("written", [0, 7], ids=["its first file", "a later file"])
def test_an_empty_file_that_a_kill_leaves_behind_gets_a_durable_name(written: int) -> None:
    """A first sync fails, the log is cut to nothing, the process is killed: the next one finds a file without bytes."""
    survived = []
    for seed in range(20):
        disk = FaultyDisk(seed)
        disk.make_directory(HERE.parent)
        disk.safe_directories |= disk.directories
        log = LocalLog.open(HERE, dataclasses.replace(SMALL, durability=Durability.FSYNC), disk=disk)
        fill(log, written)
        log.flush()
        if log.finish_segment(log.end):
            log.flush()
            log.checkpoint()
        disk.capacity = disk.used  # The file is made, and no byte is written.
        with pytest.raises(OSError, match="No space"):
            fill(log, 1)
        disk.capacity = None
        log = LocalLog.open(HERE, SMALL, disk=disk)
        fill(log, 1)
        log.flush()
        survived.append(LocalLog.open(HERE, SMALL, disk=disk.crash(), power_lost=True).end == 2 * written + 2)
    assert all(survived), survived


def test_a_sync_opens_no_file_whose_bytes_are_synced_and_a_start_leaves_no_index_to_it() -> None:
    disk = FaultyDisk(1)
    log = LocalLog.open(HERE, SMALL, disk=disk)
    fill(log, 20)
    log.flush()
    for name in disk.names(HERE):
        if name.endswith("index"):
            disk.unlink(HERE / name)
    log = LocalLog.open(HERE, SMALL, disk=disk)
    fill(log, 1)
    flush = log.begin_flush()
    batches = [file.path for file in flush.files if file.path.suffix == ".log"]
    assert batches == [log.segments[-1].path]
    assert not flush.indexed
    assert len(log.segments) > 1
    flush.run()
    log.end_flush(flush)
    assert not any(node.pending for node in disk.nodes.values())


def test_a_full_disk_refuses_appends_serves_reads_and_takes_appends_again_when_there_is_room() -> None:
    disk = FaultyDisk(1)
    log = LocalLog.open(HERE, LogConfig(), disk=disk)
    fill(log, 3)
    log.flush()
    disk.capacity = disk.used + 100
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            fill(log, 1)
        assert (log.end, offsets(log, 0)) == (6, [0, 2, 4])
    disk.capacity = disk.used
    with pytest.raises(OSError, match="No space"):
        log.delete_before(4)
    assert log.log_start == 0
    disk.capacity = None
    fill(log, 1)
    log.flush()
    assert offsets(log, 0) == [0, 2, 4, 6]


def test_after_a_failed_sync_what_readers_saw_is_written_again() -> None:
    disk = FaultyDisk(1)
    disk.make_directory(HERE.parent)
    config = LogConfig(durability=Durability.OS)
    log = LocalLog.open(HERE, config, disk=disk)
    cut: list[int] = []
    log.observe(CutNoted(cut))
    fill(log, 5)
    disk.fail_sync = True
    for now_ms in (0, 10):
        with pytest.raises(OSError, match="Input/output"):
            log.flush()
        with pytest.raises(OSError, match="Input/output"):
            fill(log, 1, now_ms=now_ms)
    assert offsets(log, 0) == [0, 2, 4, 6, 8]
    disk.fail_sync = False
    fill(log, 1, now_ms=5_000)
    log.flush()
    assert cut == []
    assert LocalLog.open(HERE, config, disk=disk.crash(), power_lost=True).end == 12


def test_attempts_to_go_on_after_a_failed_sync_are_not_made_all_the_time() -> None:
    disk = FaultyDisk(1)
    log = LocalLog.open(HERE, LogConfig(), disk=disk)
    fill(log, 1)
    disk.fail_sync = True
    with pytest.raises(OSError, match="Input/output"):
        log.flush()
    with pytest.raises(OSError, match="Input/output"):
        fill(log, 1, now_ms=10_000)
    tried = disk.syncs
    for now_ms in (10_001, 10_500, 10_999):
        with pytest.raises(OSError, match="Input/output"):
            fill(log, 1, now_ms=now_ms)
    assert disk.syncs == tried
    disk.fail_sync = False
    fill(log, 1, now_ms=11_000)


def test_a_clock_that_is_set_back_after_a_failed_sync_does_not_make_the_log_wait() -> None:
    disk = FaultyDisk(1)
    log = LocalLog.open(HERE, LogConfig(), disk=disk)
    disk.fail_sync = True
    fill(log, 1)
    with pytest.raises(OSError, match="Input/output"):
        log.flush()
    with pytest.raises(OSError, match="Input/output"):
        fill(log, 1, now_ms=3_600_000)
    disk.fail_sync = False
    fill(log, 1, now_ms=10)
    assert log.end == 2


def test_a_finished_segment_asks_for_a_sync_where_nobody_waits_for_one(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 5)
    assert not log.flush_due
    fill(log, 5)
    assert log.flush_due
    log.flush()
    assert not log.flush_due


def test_readers_never_lose_sight_of_records_when_durability_changes(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 3)
    assert log.high_watermark == 6
    log.configure(LogConfig(durability=Durability.FSYNC))
    fill(log, 1)
    assert log.high_watermark == 6
    log.flush()
    assert log.high_watermark == 8


def test_damage_that_a_read_finds_takes_the_log_offline(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    log.close()
    log = open_log(tmp_path)
    path = sorted((tmp_path / "t-0").glob("*.log"))[1]
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with pytest.raises(OfflineLogError, match=path.name):
        log.read(int(path.stem), 1)


@pytest.mark.parametrize("keep", [0, 161, 200])
def test_a_segment_that_lost_its_end_below_the_recovery_point_takes_the_log_offline(tmp_path: Path, keep: int) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    log.close()
    path = sorted((tmp_path / "t-0").glob("*.log"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(OfflineLogError, match=path.name):
        open_log(tmp_path)
    path.unlink()
    with pytest.raises(OfflineLogError, match="restore"):
        open_log(tmp_path)
    path.write_bytes(data)
    assert open_log(tmp_path).end == 60


def test_a_wrong_index_is_found_out_and_built_anew(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 30)
    log.close()
    for path in (tmp_path / "t-0").glob("*.index"):
        data = bytearray(path.read_bytes())
        middle = len(data) // 16 * 8
        data[middle + 4 : middle + 8] = (77).to_bytes(4, "big")
        path.write_bytes(data)
    log = open_log(tmp_path)
    assert [offsets(log, offset, 1)[0] for offset in range(60)] == [offset // 2 * 2 for offset in range(60)]


def test_recovery_shows_the_batches_that_it_checks_and_no_others(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 10)
    log.close()
    log = open_log(tmp_path)
    fill(log, 2)
    log.flush()
    seen: list[int] = []
    LocalLog.open(tmp_path / "t-0", SMALL, disk=Disk(), visit=lambda header: seen.append(header.base_offset))
    assert seen == [20, 22]


def test_few_files_stay_open_however_many_are_read(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 200)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for offset in range(0, 400, 2):
        assert offsets(log, offset, 1) == [offset]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_a_log_that_is_opened_and_folded_holds_no_file(tmp_path: Path) -> None:
    """A start opens many logs before they share the room for open files."""
    log = open_log(tmp_path)
    fill(log, 3)
    log = open_log(tmp_path)
    assert len(list(log.headers_from(0))) == 3
    assert not any(segment.is_open for segment in log.segments)


def test_logs_share_their_checkpoints_in_a_data_directory(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, Disk())
    assert not directory.stopped_cleanly
    logs = {number: directory.open_log(TopicPartition("t", number), SMALL, start_offset=5) for number in range(3)}
    for number, log in logs.items():
        fill(log, number)
        log.close()
    directory.stopped()
    directory.release()
    points = (tmp_path / "recovery-point-offset-checkpoint").read_text()
    assert points.startswith("1\n2\nt 1 7 "), "a log without records has no entry"
    directory = DataDirectory(tmp_path, Disk())
    assert directory.stopped_cleanly
    directory.began()
    seen: list[int] = []
    log = directory.open_log(TopicPartition("t", 2), SMALL, visit=lambda header: seen.append(header.base_offset))
    assert (log.log_start, log.end, seen) == (5, 9, [])
    directory.remove_log(TopicPartition("t", 2))
    assert directory.open_log(TopicPartition("t", 2), SMALL).end == 0
    directory.release()
    directory = DataDirectory(tmp_path, Disk())
    assert not directory.stopped_cleanly
    directory.release()


def test_an_idle_log_syncs_nothing_when_it_is_closed() -> None:
    disk = FaultyDisk(1)
    log = LocalLog.open(HERE, LogConfig(), disk=disk)
    log.start_epoch(0)
    fill(log, 3)
    log.close()
    log = LocalLog.open(HERE, LogConfig(), disk=disk)
    before = disk.syncs
    log.close()
    assert disk.syncs == before


def test_a_newest_file_that_is_empty_costs_no_sync_when_the_log_is_opened_and_closed() -> None:
    """There is one behind each closed segment that was compacted, as long as nothing is appended."""
    disk = FaultyDisk(1)
    log = LocalLog.open(HERE, LogConfig(), disk=disk)
    fill(log, 3)
    log.finish_segment(log.end)
    log.flush()
    assert log.segments.make_last() and log.segments[-1].created
    log.checkpoint()
    log.close()
    before = disk.syncs
    for _ in range(2):
        log = LocalLog.open(HERE, LogConfig(), disk=disk)
        assert [segment.base_offset for segment in log.segments] == [0, 6]
        log.close()
    assert disk.syncs == before
    log = LocalLog.open(HERE, LogConfig(), disk=disk)
    fill(log, 1)
    log.flush()
    disk = disk.crash()
    assert LocalLog.open(HERE, LogConfig(), disk=disk, power_lost=True).end == 8, "its name was not synced"


def test_a_caller_that_goes_away_takes_nobody_with_it(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig())

    async def callers() -> None:
        group = GroupCommit()
        fill(log, 1)
        gone, stays = group.commit(log), group.commit(log)
        gone.cancel()
        await stays
        group.commit(log).cancel()
        await group.drain()
        group.close()

    asyncio.run(callers())
    assert log.flushed == 2


def test_a_sync_that_succeeds_after_the_log_was_cut_is_a_failure_to_those_who_wait(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig())

    async def scenario() -> None:
        group = GroupCommit()
        fill(log, 2)
        waiting = group.commit(log)
        await asyncio.sleep(0)
        log.truncate(0)
        with pytest.raises(OSError, match="cut"):
            await waiting
        await group.drain()
        group.close()

    asyncio.run(scenario())
    assert (log.end, log.flushed) == (0, 0)


# -- logs of which nothing was ever written ---------------------------------------------------------------------------


def test_a_log_has_no_directory_until_something_is_written(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, Disk())
    name = TopicPartition("t", 0)
    log = directory.open_log(name, SMALL, start_offset=7)
    log.start_epoch(3)
    log.retain(0)
    log.flush()
    assert (log.log_start, log.end, log.flushed, log.high_watermark) == (7, 7, 7, 7)
    assert log.read(7, 1_000) is None and not snapshots_of(log) and not log.has_snapshot_from(8)
    log.close()
    assert not directory.has_log(name)
    log = directory.open_log(name, SMALL, start_offset=7)
    log.start_epoch(4)
    log.append(make_batch(2, b"x"), 4, 0)
    assert directory.logs() == [name]
    del log  # Killed.
    log = directory.open_log(name, SMALL, start_offset=7)
    assert (log.log_start, log.end, log.epochs.entries) == (7, 9, [(4, 7)])
    directory.release()


def test_a_log_that_was_written_and_has_lost_its_directory_is_damaged(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path, Disk())
    log = directory.open_log(TopicPartition("t", 0), SMALL)
    fill(log, 3)
    log.close()
    directory.checkpoints.save()
    Disk().remove_tree(tmp_path / "t-0")
    with pytest.raises(OfflineLogError, match="was synced up to 6"):
        directory.open_log(TopicPartition("t", 0), SMALL)
    directory.release()


def test_many_logs_are_deleted_with_few_syncs(tmp_path: Path) -> None:
    disk = FaultyDisk(1)
    directory = DataDirectory(Path("/data"), disk)
    names = [TopicPartition("t", number) for number in range(100)]
    for name in names[:50]:
        log = directory.open_log(name, SMALL)
        fill(log, 1)
        log.close()
    directory.checkpoints.save()
    before = disk.syncs
    assert directory.remove_logs(names) == {}
    assert disk.syncs - before < 10
    assert directory.logs() == [] and not directory.checkpoints.names()
    after = DataDirectory(Path("/data"), disk.crash())
    assert after.logs() == [], "the deletion is durable"


def test_a_log_that_cannot_be_deleted_is_told(tmp_path: Path) -> None:
    disk = FaultyDisk(1)
    directory = DataDirectory(Path("/data"), disk)
    names = [TopicPartition("t", number) for number in range(3)]
    for name in names:
        fill(directory.open_log(name, SMALL), 1)
    disk.fail_sync = True
    assert directory.remove_logs(names).keys() == set(names)
