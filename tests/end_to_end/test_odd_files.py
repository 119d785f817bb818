"""Names in the data directory that are not those of ordinary files, and files that are far too large.

Nothing waits for what has no end, and nothing is read whole that does not fit in memory: a start ends with a sentence,
or one partition is offline, and the others serve.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.delete_records import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from anabranch.protocol.messages.describe_load import DescribeLoadRequest, DescribeLoadTopic
from anabranch.protocol.messages.describe_producers import DescribeProducersRequest, TopicRequest
from anabranch.protocol.messages.describe_slices import DescribeSlicesRequest, DescribeSlicesTopic
from anabranch.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    PartitionLeaderEpochsForPartitionsRequest,
    PartitionLeaderEpochsForPartitionsRequestTopic,
)
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

TERABYTE = 1 << 40


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path) -> None:
    os.truncate(path, TERABYTE)


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("odd") / "data"
    broker = BrokerProcess(data, log_flush_offset_checkpoint_interval_ms=100).start()
    with WireClient(broker.port) as client:
        for topic in ("hurt", "sound"):
            client.create(topic)
            client.produce(topic, 0, batch([b"kept"] * 3))
    broker.kill()
    return data


def started(killed: Path, to: Path, name: str, change: Callable[[Path], None]) -> BrokerProcess:
    shutil.copytree(killed, to)
    change(to / name)
    return BrokerProcess(to).start(expect_ready=False)


def errors(client: WireClient, topic: str, number: int) -> dict[str, int]:
    """The error code of each API that has one for a partition."""
    asked = {
        "DeleteRecords": DeleteRecordsRequest(
            topics=[
                DeleteRecordsTopic(name=topic, partitions=[DeleteRecordsPartition(partition_index=number, offset=0)])
            ],
            timeout_ms=1000,
        ),
        "DescribeLoad": DescribeLoadRequest(topics=[DescribeLoadTopic(name=topic, partition_indexes=[number])]),
        "DescribeProducers": DescribeProducersRequest(topics=[TopicRequest(name=topic, partition_indexes=[number])]),
        "DescribeSlices": DescribeSlicesRequest(
            group_id="any", topics=[DescribeSlicesTopic(name=topic, partition_indexes=[number])]
        ),
        "OffsetForLeaderEpoch": OffsetForLeaderEpochRequest(
            replica_id=-1,
            topics=[
                OffsetForLeaderTopic(
                    topic=topic, partitions=[OffsetForLeaderPartition(partition=number, leader_epoch=0)]
                )
            ],
        ),
        "PartitionLeaderEpochs": PartitionLeaderEpochsForPartitionsRequest(
            topics=[PartitionLeaderEpochsForPartitionsRequestTopic(topic=topic, partitions=[number])],
            cuts=True,
        ),
    }
    found = {name: client.call(request).topics[0].partitions[0].error_code for name, request in asked.items()}
    marker = WritableTxnMarker(
        producer_id=client.producer_id(),
        topics=[WritableTxnMarkerTopic(name=topic, partition_indexes=[number])],
        coordinator_epoch=-1,
    )
    ended = client.call(WriteTxnMarkersRequest(markers=[marker])).markers[0].topics[0].partitions[0]
    fetched = client.call(client.fetch_request(client.metadata(topic).topic_id, {number: 0}), 17)
    return {
        **found,
        "WriteTxnMarkers": ended.error_code,
        "Fetch": fetched.responses[0].partitions[0].error_code,
        "ListOffsets": client.offset_at(topic, number, -1).error_code,
        "Produce": client.produce(topic, number, batch([b"more"])).error_code,
    }


def test_a_log_that_cannot_be_opened_now_is_asked_for_again_until_it_can(killed: Path, tmp_path: Path) -> None:
    """Clients were told that there is no such partition, which ends some of them."""
    name = "hurt-0/00000000000000000000.log"

    def loop(path: Path) -> None:
        path.unlink()
        path.symlink_to(path)

    broker = started(killed, tmp_path / "data", name, loop)
    try:
        assert broker._ready.wait(20)
        with WireClient(broker.port, 20) as client:
            closed = errors(client, "hurt", 0)
            assert closed == dict.fromkeys(closed, ErrorCode.KAFKA_STORAGE_ERROR)
            unknown = errors(client, "hurt", 1)
            assert unknown == dict.fromkeys(unknown, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            (tmp_path / "data" / name).unlink()
            shutil.copyfile(killed / name, tmp_path / "data" / name)
            deadline = time.monotonic() + 20
            while client.produce("hurt", 0, batch([b"more"])).error_code != ErrorCode.NONE:
                assert time.monotonic() < deadline, broker.lines
                time.sleep(0.2)
            assert [value for _, value in client.read_all("hurt", 0)] == [b"kept"] * 3 + [b"more"]
    finally:
        broker.kill()


@pytest.mark.parametrize("change", [pipe, endless, directory, huge])
def test_epochs_that_cannot_be_read_are_read_from_the_batches(
    killed: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    broker = started(killed, tmp_path / "data", "hurt-0/leader-epoch-checkpoint", change)
    try:
        assert broker._ready.wait(20), "the start waits"
        with WireClient(broker.port) as client:
            assert [value for _, value in client.read_all("hurt")] == [b"kept"] * 3
        assert broker.stop() == 0
        assert not broker.said("error") and not broker.said("raw")
        kept = tmp_path / "data" / "hurt-0" / "leader-epoch-checkpoint.damaged"
        assert kept.exists() or kept.is_symlink()
    finally:
        broker.kill()


def test_a_log_that_ends_in_a_hole_of_a_terabyte_is_cut_without_reading_it(killed: Path, tmp_path: Path) -> None:
    broker = started(killed, tmp_path / "data", "hurt-0/00000000000000000000.log", huge)
    try:
        assert broker._ready.wait(20), "the start waits"
        with WireClient(broker.port) as client:
            assert [value for _, value in client.read_all("hurt")] == [b"kept"] * 3
            assert client.produce("hurt", 0, batch([b"more"])).error_code == ErrorCode.NONE
        (kept,) = (tmp_path / "data" / "hurt-0").glob("*.torn")
        assert kept.stat().st_size > TERABYTE - 1_000 and kept.stat().st_blocks * 512 < 16 << 20
        assert broker.stop() == 0
        assert broker.said("warning") and not broker.said("error") and not broker.said("raw")
    finally:
        broker.kill()


@pytest.mark.parametrize("change", [pipe, endless, directory])
def test_a_log_that_is_no_file_takes_its_partition_offline(
    killed: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    broker = started(killed, tmp_path / "data", "hurt-0/00000000000000000000.log", change)
    try:
        assert broker._ready.wait(20), "the start waits"
        with WireClient(broker.port) as client:
            assert [value for _, value in client.read_all("sound")] == [b"kept"] * 3
            assert client.fetch("hurt").error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert client.produce("hurt", 0, batch([b"more"])).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert broker.said("error", "partition offline")
        assert broker.resident_bytes() < 300 << 20
        assert broker.stop() == 0
    finally:
        broker.kill()


@pytest.mark.parametrize("name", ["boot-id", "clean-stop", ".deleted", ".producers"])
def test_what_is_of_another_kind_is_named_with_what_to_do(killed: Path, tmp_path: Path, name: str) -> None:
    """A directory in place of a file, and the other way: the sentence named neither the fault nor a remedy."""

    def make_other(path: Path) -> None:
        path.unlink(missing_ok=True)
        if name in (".deleted", ".producers"):
            path.touch()
        else:
            path.mkdir()

    data = tmp_path / "data"
    broker = started(killed, data, name, make_other)
    try:
        assert broker._ready.wait(20), "the start waits"
        assert broker.wait() == 1
        (line,) = broker.said("error")
        assert line["event"] == "the broker cannot start"
        assert line["reason"].startswith(f"{data / name} is of another kind than the broker needs (")
        assert "Move it out of the data directory" in line["reason"]
        (data / name).rename(tmp_path / "away")
        broker = BrokerProcess(data).start()
        with WireClient(broker.port) as client:
            assert [value for _, value in client.read_all("hurt")] == [b"kept"] * 3
        assert broker.stop() == 0
    finally:
        broker.kill()


def test_names_that_are_those_of_no_partition_are_passed_over(killed: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(killed, data)
    for name in ("foo-\u00b2", "foo-1.producers", "hurt-00", "hurt-0/\u00b2.log", "-1"):
        (data / name).mkdir()
    broker = BrokerProcess(data).start()
    try:
        with WireClient(broker.port) as client:
            assert [value for _, value in client.read_all("hurt")] == [b"kept"] * 3
        (line,) = broker.said("warning", "producers of a removed partition skipped")
        assert line["file"] == str(data / "foo-1.producers")
        assert broker.stop() == 0
        assert not broker.said("error") and not broker.said("raw")
    finally:
        broker.kill()


@pytest.mark.parametrize("name", ["meta.properties", "metadata.sqlite", "boot-id", "controller-epoch"])
@pytest.mark.parametrize("change", [pipe, endless, directory, huge, garbage])
def test_a_start_without_its_small_files_ends_with_a_sentence_or_goes_on(
    killed: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    broker = started(killed, tmp_path / "data", name, change)
    try:
        assert broker._ready.wait(20), "the start waits"
        if broker.port:
            with WireClient(broker.port) as client:
                assert [value for _, value in client.read_all("hurt")] == [b"kept"] * 3
            assert broker.stop() == 0
        else:
            assert broker.wait() == 1
            (line,) = broker.said("error")
            assert line["event"] == "the broker cannot start"
        assert not broker.said("raw"), broker.said("raw")
    finally:
        broker.kill()


BESIDE = ("metadata-copy.sqlite", "metadata.sqlite-shm", "metadata.sqlite-journal", "reserve", "controller-epoch.tmp")


@pytest.mark.parametrize("name", BESIDE)
def test_a_pipe_in_place_of_a_file_that_is_only_used_keeps_no_start_waiting(
    killed: Path, tmp_path: Path, name: str
) -> None:
    broker = started(killed, tmp_path / "data", name, pipe)
    try:
        assert broker._ready.wait(20), "the start waits"
        if broker.port:
            with WireClient(broker.port) as client:
                assert [value for _, value in client.read_all("hurt")] == [b"kept"] * 3
            assert broker.stop() == 0
        else:
            assert broker.wait() == 1
            (line,) = broker.said("error")
            assert f"{name} is no ordinary file" in line["reason"] and "move it out of the way" in line["reason"]
        assert not broker.said("raw"), broker.said("raw")
    finally:
        broker.kill()


def test_a_link_that_is_left_over_under_a_temporary_name_is_not_written_through(killed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"kept")
    broker = started(
        killed, tmp_path / "data", "recovery-point-offset-checkpoint.tmp", lambda path: path.symlink_to(other)
    )
    try:
        assert broker._ready.wait(20)
        assert broker.stop() == 0
        assert other.read_bytes() == b"kept"
        checkpoint = tmp_path / "data" / "recovery-point-offset-checkpoint"
        assert checkpoint.is_file() and not checkpoint.is_symlink()
    finally:
        broker.kill()


def test_two_partitions_do_not_share_a_log(killed: Path, tmp_path: Path) -> None:
    """Each would write over what the other has acknowledged."""

    def link(path: Path) -> None:
        shutil.rmtree(path)
        path.symlink_to(path.with_name("sound-0"))

    broker = started(killed, tmp_path / "data", "hurt-0", link)
    try:
        assert broker._ready.wait(20)
        with WireClient(broker.port) as client:
            assert client.produce("hurt", 0, batch([b"more"])).error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert client.produce("sound", 0, batch([b"more"])).error_code == ErrorCode.NONE
            assert [value for _, value in client.read_all("sound")] == [b"kept"] * 3 + [b"more"]
        (line,) = broker.said("error", "partition offline")
        assert "sound-0, where another partition has its log" in line["reason"]
        assert broker.stop() == 0
    finally:
        broker.kill()


def test_a_log_may_be_elsewhere(killed: Path, tmp_path: Path) -> None:
    def move(path: Path) -> None:
        path.symlink_to(path.replace(tmp_path / "elsewhere"))

    broker = started(killed, tmp_path / "data", "hurt-0", move)
    try:
        assert broker._ready.wait(20)
        with WireClient(broker.port) as client:
            assert client.produce("hurt", 0, batch([b"more"])).error_code == ErrorCode.NONE
            assert [value for _, value in client.read_all("hurt")] == [b"kept"] * 3 + [b"more"]
        assert broker.stop() == 0
    finally:
        broker.kill()
