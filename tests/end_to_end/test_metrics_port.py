"""The port for metrics of a real broker: clients that send, or read, slowly or nothing keep no scrape waiting."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator

import pytest

from anabranch.runtime.exposition import REQUESTS_MAX
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch

SCRAPE_S_MAX = 2.0
SCRAPES = 8
ASKING, HELD_MAX = 2, 200
"""Clients that ask without end, and how many connections one of them holds."""
TRICKLE_S = 0.2
SAMPLED = 1_000
"""Partitions with records: their metrics are more than a socket takes whose peer reads nothing."""
SEGMENT_SIZE = 536
CONNECTIONS, CLOSED = "anabranch_metrics_connections", "anabranch_metrics_connections_closed_total"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("metrics")) as process:
        yield process


def connect(broker: BrokerProcess) -> socket.socket:
    """Connect with small segments and a small buffer: the broker's system buffers little for such a peer."""
    client = socket.socket()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_SIZE)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect(("127.0.0.1", broker.metrics_port))
    return client


def scraped_soon(broker: BrokerProcess) -> dict[str, float]:
    began = time.monotonic()
    metrics = broker.metrics(SCRAPE_S_MAX)
    assert time.monotonic() - began < SCRAPE_S_MAX
    return metrics


def alone(broker: BrokerProcess) -> dict[str, float]:
    """Scrape until no other connection is held, and let that of the scrape end."""
    while (metrics := broker.metrics())[CONNECTIONS] > 1:
        time.sleep(0.05)
    time.sleep(0.2)
    return metrics


@contextlib.contextmanager
def trickling(clients: list[socket.socket]) -> Iterator[None]:
    """Send a request without an end on each connection, line by line."""
    done = threading.Event()

    def send() -> None:
        while not done.wait(TRICKLE_S):
            for client in clients:
                with contextlib.suppress(OSError):
                    client.sendall(b"X-More: of it\r\n")

    for client in clients:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_requests_that_trickle_in_keep_no_scrape_waiting(broker: BrokerProcess) -> None:
    closed_before = alone(broker)[CLOSED]
    with contextlib.ExitStack() as closing:
        clients = [closing.enter_context(connect(broker)) for _ in range(REQUESTS_MAX)]
        with trickling(clients):
            time.sleep(1)
            before = scraped_soon(broker)
            after = scraped_soon(broker)
        assert before[CONNECTIONS] == REQUESTS_MAX, "all but one are held"
        assert closed_before + 1 == before[CLOSED] <= after[CLOSED] <= closed_before + 2
    assert not broker.said("raw"), broker.said("raw")


def test_answers_that_are_not_read_keep_no_scrape_waiting(broker: BrokerProcess) -> None:
    with WireClient(broker.port) as producer:
        producer.create("sampled", SAMPLED)
        for number in range(SAMPLED):
            producer.produce("sampled", number, batch([b"value"]))
    alone(broker)
    with contextlib.ExitStack() as closing:
        clients = [closing.enter_context(connect(broker)) for _ in range(REQUESTS_MAX)]
        for client in clients:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        time.sleep(1)
        assert scraped_soon(broker)[CONNECTIONS] == REQUESTS_MAX, "all but one are held"
        for _ in range(3):
            scraped_soon(broker)
    assert not broker.said("raw"), broker.said("raw")


@pytest.mark.parametrize("reads", [True, False], ids=["hang up", "read nothing"])
def test_whole_requests_without_number_keep_no_scrape_waiting(broker: BrokerProcess, reads: bool) -> None:
    done = threading.Event()

    def ask() -> None:
        held: deque[socket.socket] = deque()
        while not done.is_set():
            with contextlib.suppress(OSError):
                client = connect(broker)
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                held.append(client)
            if held and (reads or len(held) > HELD_MAX):
                held.popleft().close()
        for client in held:
            client.close()

    alone(broker)
    asking = [threading.Thread(target=ask) for _ in range(ASKING)]
    for each in asking:
        each.start()
    try:
        for _ in range(SCRAPES):
            broker.metrics(10.0)  # A machine that does much else renders slowly; none is refused.
    finally:
        done.set()
        for each in asking:
            each.join()


def test_a_scrape_of_some_names_is_given_these_alone(broker: BrokerProcess) -> None:
    names = ["kafka_server_socketservermetrics_connections", "kafka_server_socketservermetrics_unsent_bytes"]
    query = "&".join(f"name[]={name}" for name in [*names, "there_is_no_such_metric"])
    address = f"http://127.0.0.1:{broker.metrics_port}/metrics?{query}"
    with urllib.request.urlopen(address, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert sorted(line.split()[0] for line in lines if not line.startswith("#")) == names
