"""Connections that are slow, that come and go, and that do not read: a service beside them is not harmed.

Small here; `make fuzz` runs the long form: `python -m tests.end_to_end.test_many_connections 1000 5000 300`.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.protocol.frames import encode_request
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch

TOPIC = "beside"
P99_MAX_S = 0.050
WIDE = "wide"
QUEUED = 8 << 20
BUDGET = 2 * QUEUED + (100 << 20)
"""Requests that arrive, answers that are not read, and 100 MB for everything else."""
QUESTION = b"".join(
    bytes(part) for part in encode_request(MetadataRequest(topics=[MetadataRequestTopic(name=WIDE)]), 9, 1, "hostile")
)


def connected(broker: BrokerProcess, sockets: contextlib.ExitStack) -> socket.socket:
    made = sockets.enter_context(socket.create_connection(("127.0.0.1", broker.port), 30))
    made.setblocking(False)
    return made


def slow(broker: BrokerProcess, sockets: contextlib.ExitStack, count: int) -> None:
    """Open connections that send a byte of a large request now and then."""
    opened = [connected(broker, sockets) for _ in range(count)]
    for byte in struct.pack(">i", 1 << 20) + bytes(3):
        for each in opened:
            each.send(bytes([byte]))


def silent(broker: BrokerProcess, sockets: contextlib.ExitStack, count: int) -> None:
    """Open connections that ask and ask, and read no answer."""
    for _ in range(count):
        with contextlib.suppress(BlockingIOError, ConnectionError):
            each = connected(broker, sockets)
            for _ in range(30):
                each.send(QUESTION)


def churn(broker: BrokerProcess, count: int) -> None:
    """Connect, ask, and hang up, before the answer or after it."""
    for number in range(count):
        with socket.create_connection(("127.0.0.1", broker.port), 30) as each:
            each.sendall(QUESTION)
            if number % 2:
                each.recv(1)


@contextlib.contextmanager
def served(broker: BrokerProcess) -> Iterator[list[float]]:
    """A client that produces and fetches meanwhile; the times that it took, in seconds."""
    took: list[float] = []
    stop = threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            with WireClient(broker.port, 60) as client:
                while not stop.is_set() or len(took) < 20:
                    began = time.monotonic()
                    assert client.produce(TOPIC, 0, batch([b"x" * 100])).error_code == ErrorCode.NONE
                    took.append(time.monotonic() - began)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join()
    assert not failures, failures


def scene(data: Path, slow_count: int, churned: int, silent_count: int) -> list[float]:
    """Run all of it; the times of the client beside."""
    limits = {"queued_max_response_bytes": QUEUED, "queued_max_request_bytes": QUEUED}
    with running(data, **limits) as broker, contextlib.ExitStack() as sockets:
        with WireClient(broker.port, 60) as client:
            client.create(TOPIC)
            client.create(WIDE, 1_000)
        before = broker.resident_bytes()
        with served(broker) as took:
            slow(broker, sockets, slow_count)
            silent(broker, sockets, silent_count)
            churn(broker, churned)
        grown = broker.resident_bytes() - before
        assert grown < BUDGET, (grown, broker.metrics())
        assert not broker.said("error"), broker.said("error")
        connections = broker.metrics()["kafka_server_socketservermetrics_connections"]
        assert connections >= slow_count
        return took


def test_slow_silent_and_short_connections_harm_no_other_client(tmp_path: Path) -> None:
    took = sorted(scene(tmp_path, 100, 200, 30))
    assert took[len(took) // 2] < 0.5
    assert took[-1] < 5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        found = sorted(scene(Path(directory), *map(int, sys.argv[1:4])))
    most = found[len(found) * 99 // 100]
    print(f"{len(found)} requests beside, p50 {found[len(found) // 2]:.4f} s, p99 {most:.4f} s")
    sys.exit(most > P99_MAX_S)
