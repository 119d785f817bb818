"""A broker with few descriptors and many partitions: it goes on taking connections, appends and reads."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch, values_of

LIMIT = 224
COUNT = 160
MORE = 320
"""Partitions of which the slices in one answer would take all descriptors."""
TOPIC = "many"


def log_files(broker: BrokerProcess) -> int:
    """The segment files that a broker has open."""
    found = 0
    for fd in os.listdir(f"/proc/{broker.pid}/fd"):
        try:
            found += os.readlink(f"/proc/{broker.pid}/fd/{fd}").endswith(".log")
        except FileNotFoundError:
            continue
    return found


def write(client: WireClient, partition: int, value: bytes) -> None:
    """Produce a record, as often as the broker asks for."""
    for _ in range(2_000):
        answer = client.produce(TOPIC, partition, batch([value]))
        if answer.error_code != ErrorCode.KAFKA_STORAGE_ERROR:
            assert answer.error_code == ErrorCode.NONE, answer
            return
        assert "open files" in answer.error_message
        time.sleep(0.01)
    raise AssertionError(f"partition {partition} could not be written")


def assert_served(broker: BrokerProcess, expected: list[bytes]) -> None:
    """New connections are taken, and every record of every partition is there."""
    clients = [WireClient(broker.port) for _ in range(40)]
    try:
        for client in clients:
            assert client.metadata(TOPIC).error_code == ErrorCode.NONE
        for partition in range(COUNT):
            found = clients[partition % len(clients)].read_all(TOPIC, partition)
            assert [value for _, value in found] == [b"%d %s" % (partition, it) for it in expected], partition
            assert log_files(broker) < LIMIT // 2
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_more_partitions_than_descriptors_are_written_and_read(tmp_path: Path, durability: str) -> None:
    broker = BrokerProcess(tmp_path, durability=durability)
    broker.descriptors_max = LIMIT
    try:
        broker.start()
        with WireClient(broker.port) as client:
            client.create(TOPIC, COUNT)
            for value in (b"first", b"second"):
                for partition in range(COUNT):
                    write(client, partition, b"%d %s" % (partition, value))
                    assert log_files(broker) < LIMIT // 2
        assert_served(broker, [b"first", b"second"])
        metrics = broker.metrics()
        assert metrics["anabranch_log_open_files"] <= metrics["anabranch_log_open_files_max"] < LIMIT // 2
        assert metrics["anabranch_log_files_closed"] >= COUNT
        broker.kill()
        broker.start()
        assert log_files(broker) == 0 and not broker.said("error")
        assert_served(broker, [b"first", b"second"])
        with WireClient(broker.port) as client:
            for partition in range(COUNT):
                write(client, partition, b"%d third" % partition)
        assert_served(broker, [b"first", b"second", b"third"])
        assert broker.stop() == 0 and not broker.said("error")
    finally:
        if broker.alive:
            broker.kill()


def test_one_request_may_name_more_partitions_than_there_are_descriptors(tmp_path: Path) -> None:
    """One answer of slices of many files does not take the descriptors of others."""
    broker = BrokerProcess(tmp_path)
    broker.descriptors_max = LIMIT
    try:
        broker.start()
        with WireClient(broker.port) as client, WireClient(broker.port) as beside:
            client.create(TOPIC, MORE)
            for partition in range(MORE):
                write(client, partition, b"%d" % partition)
            asked = client.fetch_request(TOPIC, dict.fromkeys(range(MORE), 0))
            answers = [client.send(asked, 12) for _ in range(3)]  # Not read yet.
            assert beside.metadata(TOPIC).error_code == ErrorCode.NONE
            assert log_files(broker) < LIMIT // 2
            for sent in answers:
                partitions = client.receive(sent).responses[0].partitions
                found = {it.partition_index: values_of(it.records) for it in partitions}
                assert found == {partition: [(0, b"%d" % partition)] for partition in range(MORE)}
        assert broker.stop() == 0 and not broker.said("error")
    finally:
        if broker.alive:
            broker.kill()


def test_more_connections_than_descriptors_leave_the_logs_theirs(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    broker.descriptors_max = LIMIT
    clients: list[WireClient] = []
    try:
        broker.start()
        (said,) = broker.said("info", "fewer connections or open files than set: the limit of descriptors "
                              "(ulimit -n) is lower")  # fmt: skip
        assert said["limit"] == LIMIT and said["connections"] + said["open_files"] < LIMIT
        clients = [WireClient(broker.port) for _ in range(LIMIT + 100)]
        broker.until_said("warning", "connection refused")
        clients[0].create(TOPIC, 20)
        for partition in range(20):
            write(clients[0], partition, b"%d 1" % partition)
            assert clients[0].read_all(TOPIC, partition) == [(0, b"%d 1" % partition)]
        while clients:
            clients.pop().close()
        assert broker.stop() == 0 and not broker.said("error")
    finally:
        for client in clients:
            client.close()
        if broker.alive:
            broker.kill()
