"""One broker for the whole session, and each client connected to it once.

The broker is ours, unless CONFORMANCE_BROKER says otherwise: `apache-kafka` starts the real one, which shows that the
tests are right; `HOST:PORT` takes one that runs already.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from anabranch.client import sync
from benchmarks.peers.anabranch import Anabranch
from benchmarks.peers.kafka import ApacheKafka
from benchmarks.peers.process import ServerProcess
from tests.conformance.clients import Client
from tests.conformance.clients.aio import Aiokafka
from tests.conformance.clients.confluent import ConfluentKafka
from tests.conformance.clients.java import JavaClient
from tests.conformance.clients.javascript import KafkaJs, Platformatic
from tests.conformance.clients.kcat import KcatCommand
from tests.conformance.clients.python import KafkaPython
from tests.conformance.members.group import Group
from tests.conformance.members.process import Workers

KINDS: dict[str, type[Client]] = {
    kind.name: kind for kind in (ConfluentKafka, Aiokafka, KafkaPython, KcatCommand, KafkaJs, Platformatic, JavaClient)
}


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker that is tested."""

    address: str
    elastic: bool
    """Whether partitions can also be taken away."""
    process: ServerProcess | None


class Clients:
    """The clients of a session, each made when it is first asked for."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._made: dict[str, Client] = {}

    def __getitem__(self, name: str) -> Client:
        if name not in self._made:
            self._made[name] = KINDS[name](self._address)
        return self._made[name]

    def close(self) -> None:
        for client in self._made.values():
            client.close()


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    chosen = os.environ.get("CONFORMANCE_BROKER", "anabranch")
    if ":" in chosen:
        yield Broker(chosen, elastic=False, process=None)
        return
    process = (ApacheKafka if chosen == "apache-kafka" else Anabranch)(settings=SHARED_SETTINGS)
    with process:
        request.config.stash[PROCESS] = process
        yield Broker(process.address, elastic=chosen == "anabranch", process=process)


@pytest.fixture(scope="session")
def clients(broker: Broker) -> Iterator[Clients]:
    made = Clients(broker.address)
    yield made
    made.close()


SHARED_SETTINGS = {"group.initial.rebalance.delay.ms": "100", "log.retention.ms": "-1"}
"""Of a broker that lives long: some records are of a fixed, long past time, and retention begins after five minutes."""
GROUP_SETTINGS = {
    **SHARED_SETTINGS,
    "group.consumer.session.timeout.ms": "10000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "100",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.min.session.timeout.ms": "1000",
    "offsets.topic.num.partitions": "4",
    "group.coordinator.rebalance.protocols": "classic,consumer",
}


@pytest.fixture(scope="session")
def group_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker whose groups are quick to notice."""
    elastic = os.environ.get("CONFORMANCE_BROKER", "anabranch") == "anabranch"
    with (Anabranch if elastic else ApacheKafka)(settings=GROUP_SETTINGS) as process:
        request.config.stash[PROCESS] = process
        yield Broker(process.address, elastic=elastic, process=process)


@pytest.fixture(scope="session")
def workers(group_broker: Broker) -> Iterator[Workers]:
    made = Workers(group_broker.address)
    yield made
    made.close()


@pytest.fixture
def group(workers: Workers) -> Iterator[Group]:
    """A group of its own on a topic of its own, of 4 partitions; checked when its test is done."""
    name = f"group-{uuid.uuid4().hex[:8]}"
    with sync.Admin(workers.address) as admin:
        admin.create_topics(name, partitions=4)
    made = Group(workers, name, name)
    yield made
    made.close()
    made.check()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")
    return f"{name[:60]}-{uuid.uuid4().hex[:8]}"


PROCESS = pytest.StashKey[ServerProcess]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show what the broker said last beside a test that failed."""
    report = yield
    process = item.config.stash.get(PROCESS, None)
    if report.failed and process is not None:
        report.sections.append((f"last lines of {process.name}", process.log_tail()))
    return report
