"""Starting, stopping, being killed, a full disk, damage: what a broker says and what is still there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.describe_log_dirs import DescribeLogDirsRequest
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.metadata import MetadataRequest
from anabranch.runtime.disk import Disk, File
from anabranch.server.broker import Broker
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.settings import Settings
from tests.support.broker import ROOT, BrokerProcess, running
from tests.support.wire import WireClient, batch


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "anabranch.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )


def test_a_clean_stop_answers_what_is_in_progress_and_the_next_start_checks_nothing(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    with WireClient(broker.port) as client:
        client.create("t")
        client.produce("t", 0, batch([b"kept"]))
        sent = client.send(client.fetch_request("t", {0: 1}, wait_ms=60_000), 12)
        time.sleep(0.2)
        broker.signal(signal.SIGTERM)
        began = time.monotonic()
        assert client.receive(sent).responses[0].partitions[0].error_code == ErrorCode.NONE
        assert time.monotonic() - began < 5
        assert broker.wait() == 0
    broker.start()
    assert not broker.said("info", "logs checked after a stop that was not clean")
    with WireClient(broker.port) as client:
        assert client.read_all("t") == [(0, b"kept")]
    assert broker.stop() == 0


def test_a_clean_stop_answers_clients_that_wait_for_a_coordinators_topic(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    with WireClient(broker.port) as client:
        client.call(FindCoordinatorRequest(key_type=9, coordinator_keys=["someone"]))  # The first one is prepared for.
        sent = [client.send(FindCoordinatorRequest(key_type=kind, coordinator_keys=["someone"])) for kind in (0, 1)]
        time.sleep(0.01)
        began = time.monotonic()
        broker.signal(signal.SIGTERM)
        for each in sent:
            (answer,) = client.receive(each).coordinators
            assert answer.error_code in (ErrorCode.NONE, ErrorCode.NOT_COORDINATOR)
    assert broker.wait() == 0
    assert time.monotonic() - began < 5


def test_a_stop_answers_creations_under_way_and_begins_no_other(tmp_path: Path) -> None:
    """A stop with a thousand of them waited for the last one, beyond its timeout."""
    count, timeout_ms = 600, 600_000
    broker = BrokerProcess(tmp_path, **{"shutdown.timeout.ms": timeout_ms}).start()
    topics = [CreatableTopic(name=f"t{number}", num_partitions=1, replication_factor=1) for number in range(count)]
    with WireClient(broker.port, 120) as client, WireClient(broker.port) as other:
        sent = client.send(CreateTopicsRequest(topics=topics, timeout_ms=timeout_ms))
        while other.metadata("t0").error_code:
            pass
        broker.signal(signal.SIGTERM)
        answered = {it.name: ErrorCode(it.error_code) for it in client.receive(sent).topics}
        assert broker.wait() == 0
    assert broker.said("info", "stopped") and not broker.said("error")
    assert set(answered.values()) <= {ErrorCode.NONE, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NOT_CONTROLLER}
    refused = {name for name, error in answered.items() if error is ErrorCode.NOT_CONTROLLER}
    assert refused and len(answered) == count
    with WireClient(broker.start().port) as client:
        there = {topic.name for topic in client.call(MetadataRequest(topics=None), 12).topics}
    assert there == answered.keys() - refused
    assert broker.stop() == 0


def test_a_second_signal_ends_a_stop_that_takes_too_long(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t")
        for _ in range(20):
            client.produce("t", 0, batch([b"x" * 900_000]))
        client.send(client.fetch_request("t", {0: 0}, partition_max_bytes=50 << 20), 12)
        time.sleep(0.2)
        broker.signal(signal.SIGINT)
        broker.until_said("info", "stopping")
        broker.signal(signal.SIGINT)
        assert broker.wait(10) == 1


def test_a_data_directory_in_use_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with running(tmp_path) as broker:
        found = serve("--data", str(tmp_path), "--listen", "127.0.0.1:0", "--set", "metrics.listener=")
        assert found.returncode == 1
        assert f"is in use by the broker with process id {broker.pid}" in found.stderr


def test_a_data_directory_in_use_is_refused_also_without_its_lock_file(tmp_path: Path) -> None:
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        (tmp_path / ".lock").unlink()
        found = serve("--data", str(tmp_path), "--listen", "127.0.0.1:0", "--set", "metrics.listener=")
        assert found.returncode == 1
        assert f"The data directory {tmp_path} is in use by another broker. Stop that broker, or" in found.stderr
        assert "Traceback" not in found.stderr
        client.create("t")
        assert client.produce("t", 0, batch([b"on"])).error_code == ErrorCode.NONE


def test_an_assignor_that_is_not_installed_is_refused_with_a_sentence(tmp_path: Path) -> None:
    found = serve(
        "--data", str(tmp_path / "a"), "--listen", "127.0.0.1:0", "--set", "group.consumer.assignors=uniform,foo"
    )
    assert found.returncode == 1
    assert "group.consumer.assignors names 'foo', but installed are range, uniform." in found.stderr
    assert not (tmp_path / "a").exists(), "refused before the data directory is made"


def test_a_port_in_use_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = serve("--data", str(tmp_path / "a"), "--listen", f"127.0.0.1:{port}", "--set", "metrics.listener=")
        assert found.returncode == 1
        assert f"The broker cannot listen on 127.0.0.1:{port}" in found.stderr
        metrics = ("--listen", "127.0.0.1:0", "--set", f"metrics.listener=127.0.0.1:{port}")
        found = serve("--data", str(tmp_path / "b"), *metrics)
        assert found.returncode == 1
        assert f"Metrics cannot be served on 127.0.0.1:{port}" in found.stderr


def test_a_second_broker_serves_without_metrics_when_their_port_is_taken_unless_it_was_chosen(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "second")
    del broker.settings["metrics.listener"]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # Something else may have taken the port, which is as good.
            stack.enter_context(socket.create_server(("127.0.0.1", 9464)))
        broker.start()
        try:
            (warning,) = broker.said("warning", "metrics not served")
            assert warning["listener"] == "127.0.0.1:9464"
            assert warning["reason"]
            assert broker.metrics_port == 0
            with WireClient(broker.port) as client:
                client.create("t")
        finally:
            assert broker.stop() == 0
        chosen = ("--listen", "127.0.0.1:0", "--set", "metrics.listener=127.0.0.1:9464")
        found = serve("--data", str(tmp_path / "third"), *chosen)
        assert found.returncode == 1
        assert "Metrics cannot be served on 127.0.0.1:9464" in found.stderr


def test_a_wrong_setting_is_explained_and_every_setting_is_listed(tmp_path: Path) -> None:
    found = serve("--set", "num.partition=3")
    assert found.returncode == 2
    assert "There is no setting num.partition. Did you mean num.partitions?" in found.stderr
    config = tmp_path / "server.properties"
    config.write_text("durability=maybe\n")
    found = serve("--config", str(config))
    assert found.returncode == 2
    assert "durability cannot be 'maybe': expected one of fsync, os." in found.stderr
    assert "queued.max.request.bytes (long, default 268435456)" in serve("--settings").stdout


def test_a_full_disk_refuses_records_and_nothing_else_until_there_is_space(tmp_path: Path) -> None:
    with running(tmp_path, durability="fsync") as broker, WireClient(broker.port) as client:
        client.create("t")
        producer = client.producer_id()
        first = batch([b"x" * 1000], producer=(producer, 0, 0))
        assert client.produce("t", 0, first).base_offset == 0
        limit = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (2_000, limit[1]))
        second = batch([b"y" * 5000], producer=(producer, 0, 1))
        assert client.produce("t", 0, second).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert len(client.read_all("t")) == 1
        assert client.produce("t", 0, first).base_offset == 0
        broker.until_said("error", "append refused by the disk")
        resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, limit)
        assert client.produce("t", 0, second).base_offset == 1
        assert len(client.read_all("t")) == 2


class DoubtfulDisk(Disk):
    """A disk whose syncs of log files fail while `failing`."""

    failing = False

    def open(self, path: Path, *, create: bool = False) -> File:
        file = super().open(path, create=create)
        if path.suffix == ".log":
            file.__class__ = _DoubtfulFile
        return file


class _DoubtfulFile(File):
    __slots__ = ()

    def sync(self) -> None:
        if DoubtfulDisk.failing:
            raise OSError(errno.EIO, "Input/output error")
        super().sync()


def test_after_a_failed_sync_the_same_batch_is_taken_once_the_disk_is_well(tmp_path: Path) -> None:
    def scene(port: int) -> None:
        with WireClient(port) as client:
            client.create("t")
            producer = client.producer_id()
            batches = [batch([b"%d" % n], producer=(producer, 0, n)) for n in range(3)]
            assert client.produce("t", 0, batches[0]).base_offset == 0
            DoubtfulDisk.failing = True
            assert client.produce("t", 0, batches[1]).error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert client.produce("t", 0, batches[1]).error_code == ErrorCode.KAFKA_STORAGE_ERROR
            assert client.read_all("t") == [(0, b"0")]
            DoubtfulDisk.failing = False
            deadline = time.monotonic() + 20
            while client.produce("t", 0, batches[1]).error_code:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert client.produce("t", 0, batches[2]).base_offset == 2
            assert client.produce("t", 0, batches[1]).base_offset == 1
            assert [value for _, value in client.read_all("t")] == [b"0", b"1", b"2"]

    async def serve_in_process() -> None:
        settings = {"listeners": "127.0.0.1:0", "metrics.listener": "", "log.dirs": str(tmp_path)}
        broker = Broker(Settings.of(settings), disk=DoubtfulDisk())
        await broker.start()
        try:
            await asyncio.to_thread(scene, broker.address.port)
        finally:
            DoubtfulDisk.failing = False
            assert await broker.stop()

    asyncio.run(serve_in_process())


def test_a_defect_in_a_round_of_upkeep_is_logged_and_the_next_round_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = asyncio.Semaphore(0)

    async def maintain(replicas: Replicas, producer_idle_max_ms: int) -> None:
        rounds.release()
        raise RuntimeError("a defect")

    async def serve_in_process() -> None:
        settings = {"listeners": "127.0.0.1:0", "metrics.listener": "", "log.dirs": str(tmp_path)}
        broker = Broker(Settings.of({**settings, "log.retention.check.interval.ms": "1"}))
        await broker.start()
        async with asyncio.timeout(10):
            await rounds.acquire()
            await rounds.acquire()
        assert await broker.stop()

    monkeypatch.setattr(Replicas, "maintain", maintain)
    asyncio.run(serve_in_process())
    assert "upkeep failed" in [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_damage_takes_one_partition_offline_and_the_others_serve(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    with WireClient(broker.port) as client:
        client.create("t", 2)
        for partition in range(2):
            client.produce("t", partition, batch([b"x" * 1000]))
    assert broker.stop() == 0
    log = next((tmp_path / "t-0").glob("*.log"))
    log.write_bytes(log.read_bytes()[:500])
    broker.start()
    assert broker.said("error", "partition offline")
    with WireClient(broker.port) as client:
        assert client.fetch("t", 0).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert client.produce("t", 0, batch([b"y"])).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert len(client.read_all("t", 1)) == 1
    assert log.stat().st_size == 500
    broker.stop()


def test_a_torn_tail_is_cut_with_a_warning_and_the_log_goes_on(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, log_flush_offset_checkpoint_interval_ms=3_600_000).start()
    with WireClient(broker.port) as client:
        client.create("t")
        for n in range(3):
            client.produce("t", 0, batch([b"%d" % n]))
    broker.kill()
    log = next((tmp_path / "t-0").glob("*.log"))
    left = log.read_bytes()[:-3]
    log.write_bytes(left)
    broker.start()
    assert broker.said("warning")
    kept = log.with_name(f"{2:020d}.torn").read_bytes()
    assert kept and log.read_bytes() + kept == left, "bytes of the torn tail are gone"
    with WireClient(broker.port) as client:
        assert [value for _, value in client.read_all("t")] == [b"0", b"1"]
        assert client.produce("t", 0, batch([b"new"])).base_offset == 2
    broker.stop()


def test_a_deleted_topic_is_gone_and_another_of_its_name_starts_empty_also_after_a_kill(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    with WireClient(broker.port) as client:
        first = client.create("t", 2)
        for _ in range(3):
            client.produce("t", 0, batch([b"old"]))
        asked = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=10_000)
        assert client.call(asked).responses[0].error_code == ErrorCode.NONE
        assert not list(tmp_path.glob("t-*"))
        assert client.create("t", 2) != first
        assert client.fetch(first).error_code == ErrorCode.UNKNOWN_TOPIC_ID
        assert client.produce("t", 0, batch([b"new"])).base_offset == 0
    broker.kill()
    broker.start()
    with WireClient(broker.port) as client:
        assert client.read_all("t") == [(0, b"new")]
    broker.stop()


def test_a_batch_is_known_again_after_its_records_were_deleted_and_the_broker_was_killed(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    with WireClient(broker.port) as client:
        client.create("t")
        producer = client.producer_id()
        batches = [batch([b"%d" % n], producer=(producer, 0, n)) for n in range(4)]
        assert [client.produce("t", 0, each).base_offset for each in batches[:2]] == [0, 1]
        client.delete_everything("t", 0)
    broker.kill()
    broker.start()
    with WireClient(broker.port) as client:
        assert [client.produce("t", 0, each).base_offset for each in batches[:2]] == [0, 1]
        assert client.produce("t", 0, batches[3]).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert client.produce("t", 0, batches[2]).base_offset == 2
        assert client.read_all("t", 0, 2) == [(2, b"2")]
    broker.stop()


@pytest.mark.parametrize("killed", ["", "removed", "made again"])
def test_a_batch_is_known_again_after_its_partition_was_removed_and_made_again(tmp_path: Path, killed: str) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync").start()
    with WireClient(broker.port) as client:
        client.create("t", 1)
        assert client.resize("t", 2) is ErrorCode.NONE
        producer = client.producer_id()
        batches = [batch([b"%d" % n], producer=(producer, 0, n)) for n in range(4)]
        assert [client.produce("t", 1, each, count=2).base_offset for each in batches[:2]] == [0, 1]
        assert client.resize("t", 1) is ErrorCode.NONE
        client.delete_everything("t", 1)
        client.until_partitions("t", 1)
        assert client.produce("t", 1, batches[1], count=2).base_offset == 1
        assert client.produce("t", 1, batches[2], count=2).error_code == ErrorCode.INVALID_PARTITION_METADATA
        if killed == "removed":
            broker.kill()
            broker.start()
    with WireClient(broker.port) as client:
        assert client.produce("t", 1, batches[1], count=2).base_offset == 1
        assert client.produce("t", 1, batches[1]).base_offset == 1
        assert client.resize("t", 2) is ErrorCode.NONE
        if killed == "made again":
            broker.kill()
            broker.start()
    with WireClient(broker.port) as client:
        assert [client.produce("t", 1, each, count=2).base_offset for each in batches[:2]] == [0, 1]
        assert client.produce("t", 1, batches[3], count=2).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert client.produce("t", 1, batches[2], count=2).base_offset == 2
        assert client.read_all("t", 0) == []
        assert client.read_all("t", 1, 2) == [(2, b"2")]
        client.delete("t")
        client.create("t", 2)
        assert not list(tmp_path.glob("t-*.producers"))
        assert client.produce("t", 1, batches[3], count=2).base_offset == 0
    broker.stop()


def test_what_follows_a_refused_batch_is_refused_also_where_the_partition_is_made_in_between(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.create("t", 1)
        assert client.resize("t", 2) is ErrorCode.NONE
        assert client.resize("t", 1) is ErrorCode.NONE
        client.until_partitions("t", 1)
        producer = client.producer_id()
        batches = [batch([b"%d" % n], producer=(producer, 0, n)) for n in (5, 6)]
        assert client.produce("t", 1, batches[0], count=2).error_code == ErrorCode.INVALID_PARTITION_METADATA
        assert client.resize("t", 2) is ErrorCode.NONE
        assert client.produce("t", 1, batches[1], count=2).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert [client.produce("t", 1, each, count=2).base_offset for each in batches] == [0, 1]


def test_metrics_tell_what_happened(tmp_path: Path) -> None:
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.create("t", 1)
        client.produce("t", 0, batch([b"x", b"y"]))
        client.resize("t", 2)
        client.produce("t", 1, batch([b"z"]))
        client.resize("t", 1)
        found = broker.metrics()
        assert found['kafka_server_brokertopicmetrics_messagesin_total{topic="t"}'] == 3
        assert found['kafka_network_requestmetrics_totaltime_seconds_count{request="Produce"}'] == 2
        assert found['kafka_log_log_logendoffset{partition="0",topic="t"}'] == 2
        assert found["anabranch_retiring_partitions"] == 1
        assert found["kafka_server_socketservermetrics_connections"] == 1
        (directory,) = client.call(DescribeLogDirsRequest(topics=None)).results
        assert sum(it.partition_size for it in directory.topics[0].partitions) > 0
        with socket.create_connection(("127.0.0.1", broker.metrics_port)) as web:
            web.sendall(b"GET /elsewhere HTTP/1.1\r\n\r\n")
            assert web.recv(100).startswith(b"HTTP/1.0 404")


def test_the_broker_starts_without_the_libraries_that_it_does_not_need() -> None:
    code = (
        "import sys; sys.argv = ['anabranch', 'serve', '--set', 'no.such=1']\n"
        "from anabranch.cli.entry import main\n"
        "import anabranch.server.broker\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "needless = {'numpy', 'numba', 'pyarrow', 'typer', 'rich', 'pydantic', 'prometheus_client'}\n"
        "needless |= {'importlib.metadata', 'email', 'shutil', 'argparse', 'crc32c'}\n"
        "print(sorted(needless & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_a_broker_tells_what_its_threads_do_and_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.create("before")
        broker.signal(signal.SIGQUIT)
        deadline = time.monotonic() + 10
        while not any(line["event"].startswith("Current thread") for line in broker.said("raw")):
            assert time.monotonic() < deadline, broker.lines
            time.sleep(0.01)
        client.create("after")


def test_a_broker_that_crashes_tells_where(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    broker.signal(signal.SIGSEGV)
    assert broker.wait() == -signal.SIGSEGV
    assert any("Segmentation fault" in line["event"] for line in broker.said("raw"))
