"""A small disk that clients, or other programs, fill: a real broker on a file system of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.support.broker import BrokerProcess, log_size
from tests.support.wire import WireClient, batch

DISK_SIZE = 40 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "none", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Take all that is left of a disk."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError:
                continue
    return ballast


def commit(client: WireClient, offset: int) -> ErrorCode:
    """Commit an offset of the topic."""
    partition = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    asked = OffsetCommitRequest(group_id="g", topics=[OffsetCommitRequestTopic(name="t", partitions=[partition])])
    client.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]))
    deadline = time.monotonic() + 10
    while True:
        (topic,) = client.call(asked, 7).topics
        error = ErrorCode(topic.partitions[0].error_code)
        if not error.retriable or time.monotonic() > deadline:
            return error
        time.sleep(0.02)


def test_records_leave_room_for_offsets_topics_and_deletions(small_disk: Path) -> None:
    broker = BrokerProcess(small_disk / "data").start()
    try:
        with WireClient(broker.port) as client:
            client.create("t")
            client.create("other")
            client.produce("other", 0, batch([b"first"]))
            taken = 0
            for size in (1_000_000, 4_000, 1):
                while not (answer := client.produce("t", 0, batch([b"x" * size]))).error_code:
                    taken += size
                assert answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert taken > 10_000_000
            assert commit(client, taken) is ErrorCode.NONE
            assert "log.dirs.free.bytes.min" in answer.error_message
            client.create("made")
            assert client.resize("made", 3) is ErrorCode.NONE
            client.delete("t")
            deadline = time.monotonic() + 10
            while client.produce("other", 0, batch([b"second"])).error_code:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert [value for _, value in client.read_all("other")] == [b"first", b"second"]
        assert broker.said("error", "records refused: the disk is nearly full")
        assert broker.said("info", "records taken again: the disk has space")
        assert broker.stop() == 0
    finally:
        broker.kill()


@pytest.mark.parametrize("way", ["topics", "records"])
def test_deletions_free_a_disk_that_another_program_has_filled(small_disk: Path, way: str) -> None:
    broker = BrokerProcess(small_disk / "data", reaper_interval_ms=100).start()
    try:
        with WireClient(broker.port) as client:
            client.create("t", segment_bytes="100000")
            client.create("other")
            for _ in range(20):
                assert not client.produce("t", 0, batch([b"x" * 100_000])).error_code
            for _ in range(2):
                fill(small_disk)
                assert client.produce("other", 0, batch([b"no"])).error_code == ErrorCode.KAFKA_STORAGE_ERROR
                if way == "topics":
                    client.delete("t")
                    assert not (small_disk / "data" / "t-0").exists()
                    client.create("t", segment_bytes="100000")
                else:
                    assert client.delete_everything("t", 0) > 0
                assert (small_disk / "data" / "reserve").stat().st_size > 1 << 20, "reserved again"
        assert broker.stop() == 0
    finally:
        broker.kill()


def test_retention_frees_a_disk_that_another_program_has_filled(small_disk: Path) -> None:
    broker = BrokerProcess(small_disk / "data", log_retention_check_interval_ms=500).start()
    try:
        with WireClient(broker.port) as client:
            client.create("t", segment_bytes="100000", retention_ms="2000")
            now_ms = time.time_ns() // 1_000_000
            for _ in range(20):
                assert not client.produce("t", 0, batch([b"x" * 100_000], timestamp=now_ms)).error_code
            fill(small_disk)
            log, deadline = small_disk / "data" / "t-0", time.monotonic() + 20
            while log_size(log) > 200_000:
                assert time.monotonic() < deadline, broker.said("warning")
                time.sleep(0.1)
    finally:
        broker.kill()


def test_a_broker_stops_and_starts_on_a_full_disk_again_and_again(small_disk: Path) -> None:
    broker = BrokerProcess(small_disk / "data", durability="fsync").start()
    try:
        with WireClient(broker.port) as client:
            client.create("t")
            for number in range(5):
                assert client.produce("t", 0, batch([b"%d" % number])).base_offset == number
        for how in ("kill", "stop", "kill", "kill"):
            ballast = fill(small_disk)
            assert os.statvfs(small_disk).f_bavail == 0
            broker.kill() if how == "kill" else broker.stop()
            assert not broker.said("raw"), "no traceback"
            broker.start()
            with WireClient(broker.port) as client:
                assert len(client.read_all("t")) == 5
                assert client.produce("t", 0, batch([b"no"])).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        ballast.unlink()
        with WireClient(broker.port) as client:
            deadline = time.monotonic() + 10
            while client.produce("t", 0, batch([b"5"])).error_code:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        broker.kill()
        with WireClient(broker.start().port) as client:
            assert [value for _, value in client.read_all("t")] == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert broker.stop() == 0
    finally:
        broker.kill()
