"""Many ask for long answers at once, and read them late, or hang up: memory stays, and others are served."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.protocol.messages.api_versions import ApiVersionsRequest
from anabranch.protocol.messages.describe_log_dirs import DescribableLogDirTopic, DescribeLogDirsRequest
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient

TOPIC, PARTITIONS = "wide", 8_000
CLIENTS, REQUESTS = 30, 16
GROWTH_MAX = 80 << 20
"""Bytes. Gathered side by side these answers take 400 MB."""
TIMEOUT_S = 120.0
VERSION = 4
ALL = DescribeLogDirsRequest(topics=None)
GATHERED = "kafka_server_socketservermetrics_gathered_bytes"
WAITING = "kafka_server_socketservermetrics_gathered_waiting"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with running(tmp_path) as broker, WireClient(broker.port, TIMEOUT_S) as client:
        client.create(TOPIC, PARTITIONS)
        yield broker


def all_asking(broker: BrokerProcess) -> list[WireClient]:
    """Clients that have asked for long answers."""
    clients = [WireClient(broker.port, TIMEOUT_S) for _ in range(CLIENTS)]
    for client in clients:
        for _ in range(REQUESTS):
            client.send(ALL, VERSION)
    return clients


def until_idle(broker: BrokerProcess) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (found := broker.metrics(TIMEOUT_S)) and (found[GATHERED] or found[WAITING]):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_memory_stays_and_short_answers_do_not_wait(broker: BrokerProcess) -> None:
    with WireClient(broker.port, TIMEOUT_S) as beside:
        beside.call(ALL, VERSION)
        before = broker.resident_bytes()
        broker.forget_peak()
        clients = all_asking(broker)
        short = DescribeLogDirsRequest(topics=[DescribableLogDirTopic(topic=TOPIC, partitions=[3])])
        assert broker.metrics(TIMEOUT_S)[WAITING] > CLIENTS
        versions = ApiVersionsRequest(client_software_name="beside", client_software_version="1")
        assert beside.call(versions).error_code == 0
        (found,) = beside.call(short, VERSION).results[0].topics
        assert [it.partition_index for it in found.partitions] == [3]
        assert broker.metrics(TIMEOUT_S)[WAITING] > 0, "the short answer overtook long ones"
        for client in clients:
            for _ in range(REQUESTS):
                assert len(client.receive_frame()) > PARTITIONS
            client.close()
    assert broker.peak_bytes() - before < GROWTH_MAX
    until_idle(broker)


def test_who_hangs_up_leaves_the_line(broker: BrokerProcess) -> None:
    for _ in range(3):
        for client in all_asking(broker):
            client.close()
    with WireClient(broker.port, TIMEOUT_S) as client:
        assert len(client.call(ALL, VERSION).results[0].topics[0].partitions) == PARTITIONS
    until_idle(broker)
    assert not broker.said("error")
