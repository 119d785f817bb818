"""A data directory that was damaged between two lives of a broker: it tells, and deletes nothing."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.records.checksum import crc32c
from tests.support.broker import BrokerProcess
from tests.support.commands import run
from tests.support.wire import WireClient, batch


def soon(path: Path) -> BrokerProcess:
    """A broker that saves its checkpoints, and the copy of its metadata, at once."""
    return BrokerProcess(path, durability="fsync", log_flush_offset_checkpoint_interval_ms=20, reaper_interval_ms=50)


def has(path: Path, *texts: bytes) -> bool:
    data = path.read_bytes() if path.exists() else b""
    return all(text in data for text in texts)


def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def files(path: Path) -> dict[str, bytes]:
    """The files of all logs, but those that can be built anew."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.glob("*-*/*.log")}


def alter(client: WireClient, topic: str, name: str, value: str) -> None:
    config = AlterableConfig(name=name, config_operation=0, value=value)
    resource = AlterConfigsResource(resource_type=2, resource_name=topic, configs=[config])
    (answer,) = client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses
    assert answer.error_code == ErrorCode.NONE, answer


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[:200] = bytes(200)
    path.write_bytes(data)


def take_the_older(path: Path) -> None:
    shutil.copy(path.with_name("older"), path)


@pytest.mark.parametrize("damage", [remove, empty, garble, take_the_older])
def test_without_its_metadata_a_broker_refuses_logs_and_a_repair_restores_them(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    metadata, copy = tmp_path / "metadata.sqlite", tmp_path / "metadata-copy.sqlite"
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("first")
    assert broker.stop() == 0
    shutil.copy(metadata, tmp_path / "older")
    broker.start()
    with WireClient(broker.port) as client:
        client.create("t", 2, **{"retention.ms": "-1"})
        client.resize("t", 3)
        topic = client.metadata("t").topic_id
        producer = client.producer_id()
        client.produce("t", 0, batch([b"kept"], producer=(producer, 0, 0)))
        until(lambda: has(copy, b"retention.ms", b'"resize":null'))
        before = copy.stat().st_mtime_ns
        client.create("last")
        until(lambda: copy.stat().st_mtime_ns != before)
    broker.kill()
    damage(metadata)
    for name in ("-wal", "-shm"):
        metadata.with_name(metadata.name + name).unlink(missing_ok=True)
    before_repair = files(tmp_path)

    broker.start(expect_ready=False)
    assert broker.wait() == 1
    assert "anabranch repair" in broker.said("error", "the broker cannot start")[0]["reason"]
    assert files(tmp_path) == before_repair

    told, _ = run("", "repair", "--data", tmp_path)
    assert "would restore metadata.sqlite" in told
    broker.start(expect_ready=False)
    assert broker.wait() == 1, "a dry run has changed something"
    run("", "repair", "--data", tmp_path, "--apply")
    assert files(tmp_path) == before_repair
    assert damage is remove or list(tmp_path.glob("metadata.sqlite*.damaged"))
    assert "Nothing to repair" in run("", "repair", "--data", tmp_path)[0]

    broker.start()
    with WireClient(broker.port) as client:
        found = client.metadata("t")
        assert (found.topic_id, len(found.partitions)) == (topic, 3)
        assert client.read_all("t") == [(0, b"kept")]
        assert client.producer_id() > producer
        assert client.produce("t", 0, batch([b"new"])).base_offset == 1
        client.create("another")
    broker.stop()


def test_a_flipped_bit_of_the_last_changes_is_refused_and_a_repair_has_them(tmp_path: Path) -> None:
    """They are in SQLite's write-ahead log, and SQLite takes them back without a word, a config, too."""
    metadata, copy = tmp_path / "metadata.sqlite", tmp_path / "metadata-copy.sqlite"
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t", **{"retention.ms": "604800000"})
        until(lambda: has(copy, b"604800000"))
        client.produce("t", 0, batch([b"kept"]))
        broker.kill()
    log = metadata.with_name(metadata.name + "-wal")
    data = bytearray(log.read_bytes())
    data[40] ^= 1
    log.write_bytes(data)
    before = files(tmp_path)
    for _ in range(2):  # It is found again: nothing was changed.
        broker.start(expect_ready=False)
        assert broker.wait() == 1
        reason = broker.said("error", "the broker cannot start")[-1]["reason"]
        assert "metadata.sqlite-wal is damaged" in reason and "anabranch repair" in reason
        assert files(tmp_path) == before
    told, _ = run("", "repair", "--data", tmp_path)
    assert "would restore metadata.sqlite from metadata-copy.sqlite" in told and files(tmp_path) == before
    run("", "repair", "--data", tmp_path, "--apply")
    broker.start()
    with WireClient(broker.port) as client:
        assert client.read_all("t") == [(0, b"kept")]
    assert "604800000" in run(broker.address, "topic", "config", "t")[0]
    assert broker.stop() == 0


@pytest.mark.parametrize("loses_power", [False, True])
def test_metadata_without_its_last_changes_is_brought_up_to_the_logs_by_a_repair(
    tmp_path: Path, loses_power: bool
) -> None:
    """No producer's id is given out again, and no log is ahead of its leader epoch: both were lost with the changes.

    `loses_power`: the file of a log's epochs is the one before, too; its records tell.
    """
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t")
        client.produce("t", 0, batch([b"first"]))
    run(broker.address, "topic", "resize", "t", "--partitions", "2")
    with WireClient(broker.port) as client:
        client.produce("t", 0, batch([b"second"]))
    until(lambda: has(tmp_path / "metadata-copy.sqlite", b"topics/t/partitions/1"))
    log = tmp_path / "metadata.sqlite-wal"
    before = len(frames_of(log.read_bytes()))
    epochs = tmp_path / "t-0" / "leader-epoch-checkpoint"
    earlier = epochs.read_bytes()
    run(broker.address, "topic", "resize", "t", "--partitions", "1")
    with WireClient(broker.port) as client:
        producer = client.producer_id()
        client.produce("t", 0, batch([b"kept"], producer=(producer, 0, 0)))
        broker.kill()
    damage_frame(log, before)
    broker.start(expect_ready=False)
    assert broker.wait() == 1
    (tmp_path / "metadata-copy.sqlite").unlink()
    if loses_power:
        assert epochs.read_bytes() != earlier
        epochs.write_bytes(earlier)
    told, _ = run("", "repair", "--data", tmp_path, "--apply")
    assert "up to the logs: /brokers/topics/t/partitions/0" in told and "Repaired" in told
    assert "Nothing to repair" in run("", "repair", "--data", tmp_path)[0]
    broker.start()
    with WireClient(broker.port) as client:
        assert client.producer_id() > producer
        assert client.read_all("t") == [(0, b"first"), (1, b"second"), (2, b"kept")]
    assert broker.stop() == 0


def test_a_repair_without_the_last_changes_keeps_what_is_later_than_the_copy(tmp_path: Path) -> None:
    """A topic whose creation is lost, with its log, costs no other change: its log is moved away."""
    metadata, copy = tmp_path / "metadata.sqlite", tmp_path / "metadata-copy.sqlite"
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t", **{"retention.ms": "604800000"})
        client.produce("t", 0, batch([b"kept"]))
        until(lambda: has(copy, b"604800000"))
    assert broker.stop() == 0
    broker.settings["log.flush.offset.checkpoint.interval.ms"] = 3_600_000
    broker.start()
    log = metadata.with_name(metadata.name + "-wal")
    with WireClient(broker.port) as client:
        alter(client, "t", "retention.ms", "-1")
        before = len(frames_of(log.read_bytes()))
        client.create("lost")
        client.produce("lost", 0, batch([b"of no topic"]))
        broker.kill()
    damage_frame(log, before)
    broker.start(expect_ready=False)
    assert broker.wait() == 1
    told, _ = run("", "repair", "--data", tmp_path, "--apply")
    assert "from what is sound of it" in told and list((tmp_path / "unknown" / "lost-0").glob("*.log"))
    assert "Nothing to repair" in run("", "repair", "--data", tmp_path)[0]
    broker.start()
    with WireClient(broker.port) as client:
        assert client.read_all("t") == [(0, b"kept")]
    configs = json.loads(run(broker.address, "topic", "config", "t", "--json")[0])
    assert configs["retention.ms"]["value"] == "-1"
    assert broker.stop() == 0


def test_a_repair_with_a_copy_that_is_later_names_the_topics_that_are_only_in_it(tmp_path: Path) -> None:
    metadata, copy = tmp_path / "metadata.sqlite", tmp_path / "metadata-copy.sqlite"
    broker = soon(tmp_path).start()
    log = metadata.with_name(metadata.name + "-wal")
    with WireClient(broker.port) as client:
        client.create("t")
        before = len(frames_of(log.read_bytes()))
        client.create("made")
        until(lambda: has(copy, b"/brokers/topics/made/"))
        broker.kill()
    damage_frame(log, before)
    told, _ = run("", "repair", "--data", tmp_path)
    assert "topics that are only there, made in the last seconds or deleted: made" in told


def damage_frame(log: Path, number: int) -> None:
    data = bytearray(log.read_bytes())
    data[frames_of(data)[number] + 100] ^= 1
    log.write_bytes(data)


def frames_of(log: bytes | bytearray, size: int = 24 + 4096) -> list[int]:
    """Where the frames of a write-ahead log lie that are of its generation."""
    return [at for at in range(32, len(log) - size + 1, size) if log[at + 8 : at + 16] == log[16:24]]


def test_a_flipped_bit_of_a_config_is_refused_and_a_repair_takes_this_node_from_the_copy(tmp_path: Path) -> None:
    metadata, copy = tmp_path / "metadata.sqlite", tmp_path / "metadata-copy.sqlite"
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t", **{"retention.ms": "604800000"})
        until(lambda: has(copy, b"604800000"))
    assert broker.stop() == 0
    broker.settings["log.flush.offset.checkpoint.interval.ms"] = 3_600_000
    broker.start()
    with WireClient(broker.port) as client:
        client.create("later")
        client.produce("later", 0, batch([b"kept"]))
        producer = client.producer_id()
    assert broker.stop() == 0
    flipped = metadata.read_bytes().replace(b'"retention.ms":"604800000"', b'"retention.ms":"204800000"')
    assert flipped != metadata.read_bytes()
    metadata.write_bytes(flipped)

    broker.start(expect_ready=False)
    assert broker.wait() == 1
    reason = broker.said("error", "the broker cannot start")[0]["reason"]
    assert str(metadata) in reason
    assert "the node /config/topics/t does not fit its checksum" in reason
    assert "anabranch repair" in reason
    assert metadata.read_bytes() == flipped
    assert "would restore /config/topics/t of metadata.sqlite" in run("", "repair", "--data", tmp_path)[0]
    run("", "repair", "--data", tmp_path, "--apply")
    assert (tmp_path / "metadata.sqlite.damaged").read_bytes() == flipped
    assert "Nothing to repair" in run("", "repair", "--data", tmp_path)[0]

    broker.start()
    with WireClient(broker.port) as client:
        assert client.read_all("later") == [(0, b"kept")]
        assert client.producer_id() > producer
        until(lambda: b'"retention.ms":"604800000"' in metadata.read_bytes())
    broker.stop()


@pytest.mark.parametrize("damage", [remove, empty, garble])
def test_metadata_of_topics_without_records_is_refused_and_repaired_as_well(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t", 3)
        until(lambda: has(tmp_path / "metadata-copy.sqlite", b"/brokers/topics/t/"))
    assert broker.stop() == 0
    damage(tmp_path / "metadata.sqlite")
    broker.start(expect_ready=False)
    assert broker.wait() == 1
    assert "anabranch repair" in broker.said("error", "the broker cannot start")[0]["reason"]
    assert "would restore metadata.sqlite" in run("", "repair", "--data", tmp_path)[0]
    run("", "repair", "--data", tmp_path, "--apply")
    broker.start()
    with WireClient(broker.port) as client:
        assert len(client.metadata("t").partitions) == 3
    broker.stop()


def test_a_log_of_no_topic_is_moved_away_by_a_repair_and_not_adopted(tmp_path: Path) -> None:
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t")
        client.produce("t", 0, batch([b"kept"]))
        until(lambda: has(tmp_path / "metadata-copy.sqlite", b"/brokers/topics/t/"))
    broker.stop()
    shutil.copytree(tmp_path / "t-0", tmp_path / "stray-0")
    garble(next((tmp_path / "stray-0").glob("*.snapshot")))
    broker.start(expect_ready=False)
    assert broker.wait() == 1
    assert "does not have stray-0" in broker.said("error", "the broker cannot start")[0]["reason"]
    metadata = (tmp_path / "metadata.sqlite").read_bytes()
    run("", "repair", "--data", tmp_path, "--apply")
    assert list((tmp_path / "unknown" / "stray-0").glob("*.log"))
    assert list((tmp_path / "unknown" / "stray-0").glob("*.snapshot.damaged"))
    assert (tmp_path / "metadata.sqlite").read_bytes() == metadata, "it is sound, and later than the copy"
    broker.start()
    with WireClient(broker.port) as client:
        assert client.read_all("t") == [(0, b"kept")]
        client.create("stray")
        assert client.read_all("stray") == []
    broker.stop()


def test_a_lost_log_start_is_told_and_repaired(tmp_path: Path) -> None:
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        for topic in ("t", "u"):
            client.create(topic)
            client.produce(topic, 0, batch([b"kept"]))
    broker.stop()
    path = tmp_path / "log-start-offset-checkpoint"
    path.write_bytes(path.read_bytes().replace(b"t 0 0", b"t 0 4"))
    broker.start()
    with WireClient(broker.port) as client:
        assert client.fetch("t").error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert client.read_all("u") == [(0, b"kept")]
    assert broker.said("error", "partition offline")
    broker.stop()
    assert "would start the log of t-0 at offset 0" in run("", "repair", "--data", tmp_path)[0]
    run("", "repair", "--data", tmp_path, "--apply")
    assert list(tmp_path.glob("log-start-offset-checkpoint*.damaged"))
    broker.start()
    with WireClient(broker.port) as client:
        assert client.read_all("t") == [(0, b"kept")]
    broker.stop()


def checkpointed(offset: int) -> bytes:
    """The line of a checkpoint for t-0, with its checksum."""
    line = b"t 0 %d" % offset
    return b"%s %08x" % (line, crc32c(line))


def offline(broker: BrokerProcess, client: WireClient, reason: str) -> None:
    """The partition t-0 is offline, and the log of the broker says why."""
    assert client.fetch("t").error_code == ErrorCode.KAFKA_STORAGE_ERROR
    (said,) = broker.said("error", "partition offline")
    assert reason in said["reason"], said


def test_damage_with_sound_records_behind_it_is_no_torn_tail(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, log_flush_offset_checkpoint_interval_ms=3_600_000).start()
    with WireClient(broker.port) as client:
        client.create("t", segment_bytes="1000")
        for number in range(40):
            client.produce("t", 0, batch([b"%0100d" % number]))
    broker.kill()
    first, *others = sorted((tmp_path / "t-0").glob("*.log"))
    assert len(others) > 2
    damaged = bytearray(first.read_bytes())
    damaged[300] ^= 1
    first.write_bytes(damaged)
    before = files(tmp_path)
    broker.start()
    with WireClient(broker.port) as client:
        offline(broker, client, "it is a whole batch that has changed")
    broker.stop()
    assert files(tmp_path) == before, "files of a damaged log have changed"


def test_a_flipped_bit_of_a_log_start_hides_no_records(tmp_path: Path) -> None:
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t")
        for _ in range(5):
            client.produce("t", 0, batch([b"kept"]))
    broker.stop()
    path = tmp_path / "log-start-offset-checkpoint"
    found = path.read_bytes()
    assert checkpointed(0) in found
    path.write_bytes(found.replace(b"t 0 0", b"t 0 1"))
    broker.start()
    with WireClient(broker.port) as client:
        offline(broker, client, "log-start-offset-checkpoint is damaged")
    broker.stop()


def test_a_flipped_bit_of_a_producer_snapshot_forgets_no_producer(tmp_path: Path) -> None:
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t")
        producer = client.producer_id()
        client.produce("t", 0, batch([b"once"], producer=(producer, 0, 0)))
        client.delete_everything("t", 0)
        client.produce("t", 0, batch([b"kept"]))
    broker.stop()
    sound = {path: path.read_bytes() for path in (tmp_path / "t-0").glob("*.snapshot")}
    assert sound
    for path, data in sound.items():
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = {path: path.read_bytes() for path in sound}
    broker.start()
    with WireClient(broker.port) as client:
        offline(broker, client, "what they repeat could be appended twice")
        refused = client.produce("t", 0, batch([b"once"], producer=(producer, 0, 0)))
        assert refused.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    broker.stop()
    assert {path: path.read_bytes() for path in (tmp_path / "t-0").glob("*.snapshot")} == damaged

    for path, data in sound.items():
        path.write_bytes(data)
    broker.start()
    with WireClient(broker.port) as client:
        assert client.produce("t", 0, batch([b"once"], producer=(producer, 0, 0))).base_offset == 0, "repeated"
        assert client.read_all("t", start=1) == [(1, b"kept")]
    broker.stop()

    for path in (tmp_path / "t-0").glob("*.snapshot"):
        path.write_bytes(path.read_bytes()[:-1])
    told, _ = run("", "repair", "--data", tmp_path)
    assert all(f"would rename {path}" in told for path in (tmp_path / "t-0").glob("*.snapshot"))
    run("", "repair", "--data", tmp_path, "--apply")
    assert list((tmp_path / "t-0").glob("*.snapshot.damaged")) and not list((tmp_path / "t-0").glob("*.snapshot"))
    assert "Nothing to repair" in run("", "repair", "--data", tmp_path)[0]
    broker.start()
    with WireClient(broker.port) as client:
        assert client.read_all("t", start=1) == [(1, b"kept")]
        assert client.produce("t", 0, batch([b"new"])).error_code == ErrorCode.NONE
    broker.stop()


def test_a_log_start_behind_the_end_is_damage(tmp_path: Path) -> None:
    broker = soon(tmp_path).start()
    with WireClient(broker.port) as client:
        client.create("t")
        client.produce("t", 0, batch([b"kept"]))
    broker.stop()
    path = tmp_path / "log-start-offset-checkpoint"
    path.write_bytes(path.read_bytes().replace(checkpointed(0), checkpointed(4)))
    before = files(tmp_path)
    broker.start()
    with WireClient(broker.port) as client:
        offline(broker, client, "the checkpoint says that the log starts at offset 4")
    broker.stop()
    assert files(tmp_path) == before


def test_a_partition_that_fails_keeps_no_other_from_its_retention(tmp_path: Path) -> None:
    settings = {"log_retention_check_interval_ms": 50, "log_segment_bytes": 1_000}
    broker = BrokerProcess(tmp_path, **settings).start()
    with WireClient(broker.port) as client:
        for topic in ("a", "b", "c"):
            client.create(topic, retention_ms="-1")
            for number in range(20):
                producer = client.producer_id()
                client.produce(topic, 0, batch([b"%0100d" % number], producer=(producer, 0, 0)))
        (tmp_path / "a-0").rename(tmp_path.parent / f"{tmp_path.name}-gone")  # At once: the broker writes in it.
        for topic in ("a", "b", "c"):
            alter(client, topic, "retention.ms", "1000")
        until(lambda: all(client.fetch(topic, 0, 20).log_start_offset for topic in ("b", "c")))
        assert client.fetch("a", 0, 20).log_start_offset == 0
    until(lambda: broker.metrics()["anabranch_upkeep_failures_total"] > 0)
    assert broker.said("warning", "retention or producer snapshot failed")
    broker.kill()


@pytest.mark.parametrize("length", [245, 246, 249])
def test_a_topic_of_the_longest_name_is_created_resized_and_deleted(tmp_path: Path, length: int) -> None:
    broker = soon(tmp_path).start()
    name = "n" * length
    with WireClient(broker.port) as client:
        client.create(name)
        client.produce(name, 0, batch([b"x"]))
        assert client.resize(name, 12) is ErrorCode.NONE
        assert client.resize(name, 11) is ErrorCode.NONE
        client.until_partitions(name, 11)
        client.delete(name)
        until(lambda: not list(tmp_path.glob("nnn*-*")))
    assert not broker.said("error")
    broker.kill()
    (tmp_path / ".deleted" / "7").mkdir(parents=True)
    broker.start()
    until(lambda: not [*(tmp_path / ".deleted").iterdir()])
    broker.stop()
