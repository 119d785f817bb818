"""Bits that flip on the disk of a running broker: the scrub finds them, and no reader is served them."""

from __future__ import annotations

import time
from pathlib import Path

from anabranch.base.errors import ErrorCode
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch

OFFLINE = "kafka_server_replicamanager_offlinereplicacount"


def write(broker: BrokerProcess, topic: str) -> None:
    with WireClient(broker.port) as client:
        client.create(topic, retention_ms="-1", segment_bytes="2000")
        for number in range(20):
            assert client.produce(topic, 0, batch([b"%0500d" % number])).error_code == ErrorCode.NONE


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    with path.open("r+b") as file:
        file.write(data)


def test_a_bit_that_flips_takes_its_partition_offline_until_the_file_is_restored(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, durability="fsync", log_scrub_interval_ms=50).start()
    for topic in ("t", "u"):
        write(broker, topic)
    assert broker.stop() == 0
    broker.start()  # What lies below the recovery point is not checked by later starts.
    while broker.metrics()["anabranch_scrub_passes_total"] < 2:
        time.sleep(0.05)
    assert broker.metrics()[OFFLINE] == 0
    assert not broker.said("error")
    path = sorted(tmp_path.glob("t-0/*.log"))[2]
    sound = path.read_bytes()
    flip(path, len(sound) - 100)
    (line,) = broker.until_said("error", "partition offline", timeout_s=30)
    assert line["partition"] == "t-0"
    assert str(path) in line["reason"] and "position" in line["reason"] and "offset" in line["reason"]
    metrics = broker.metrics()
    assert (metrics["anabranch_scrub_damage_total"], metrics[OFFLINE]) == (1, 1)
    damaged, note, until = path.read_bytes(), tmp_path / "t-0" / "scrub-finding", time.monotonic() + 30
    while not note.exists():  # It follows what is said, durably.
        assert time.monotonic() < until
        time.sleep(0.01)
    with WireClient(broker.port) as client:
        assert client.fetch("t").error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert client.produce("t", 0, batch([b"x"])).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert len(client.read_all("u")) == 20
    broker.kill()

    broker.settings["log.scrub.interval.ms"] = -1
    flip(note, 5)
    hurt = note.read_bytes()
    broker.start()
    with WireClient(broker.port) as client:
        assert client.fetch("t").error_code == ErrorCode.KAFKA_STORAGE_ERROR, "the finding was forgotten"
        assert len(client.read_all("u")) == 20
    assert path.read_bytes() == damaged
    assert note.exists() and note.with_name("scrub-finding.damaged").read_bytes() == hurt
    broker.stop()

    path.write_bytes(sound)
    broker.start()
    with WireClient(broker.port) as client:
        assert len(client.read_all("t")) == 20
        assert client.produce("t", 0, batch([b"x"])).base_offset == 20
    broker.stop()


def test_a_scrub_takes_no_segment_for_damaged_that_is_compacted_meanwhile(tmp_path: Path) -> None:
    """It lists the segments, and comes to each later: another one may have its name by then, with gaps in it."""
    quick = {
        "log_scrub_interval_ms": 10,
        "log_scrub_max_bytes_per_second": 1 << 20,
        "log_cleaner_backoff_ms": 10,
        "log_flush_offset_checkpoint_interval_ms": 10,
    }
    with running(tmp_path, **quick) as broker, WireClient(broker.port) as client:
        client.create("t", cleanup_policy="compact", segment_bytes="2000", min_cleanable_dirty_ratio="0.01")
        number, until = 0, time.monotonic() + 8
        while time.monotonic() < until:
            for _ in range(20):
                number += 1
                value = b"%0400d" % number
                key = b"%d" % (number if number % 4 == 0 else number % 3)  # Files shrink, and several become one.
                assert not client.produce("t", 0, batch([value], key=key)).error_code, number
            time.sleep(0.1)
        until = time.monotonic() + 60
        while len(client.read_all("t")) > number * 3 / 4 or broker.metrics()["anabranch_scrub_passes_total"] < 5:
            assert time.monotonic() < until, broker.metrics()
        metrics = broker.metrics()
        assert (metrics["anabranch_scrub_damage_total"], metrics[OFFLINE]) == (0, 0), broker.said("error")


def test_a_scrub_keeps_to_its_rate_and_ends_with_the_broker(tmp_path: Path) -> None:
    broker = BrokerProcess(
        tmp_path, durability="fsync", log_scrub_interval_ms=50, log_scrub_max_bytes_per_second=4096
    ).start()
    write(broker, "t")
    began = time.monotonic()
    while time.monotonic() - began < 4:  # Twenty batches, each counts 4 KiB.
        assert broker.metrics()["anabranch_scrub_bytes_total"] < 12 * 600
        time.sleep(0.2)
    began = time.monotonic()
    assert broker.stop() == 0
    assert time.monotonic() - began < 10
