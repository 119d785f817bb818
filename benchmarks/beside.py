"""An honest client beside hostile ones: how long its requests take, against the same client on a quiet broker.

The honest client produces a record and fetches it again, in turn. The attacks come from a process of their own, of low
priority, as such clients would not share the broker's machine: hostile frames of every API (those of
`tests.fuzz.frames`), 100 connections that send hundreds of small requests at once, 300 that ask for much and read
nothing. Both sides are measured on one broker, one after the other; the limit is that of p99 beside attacks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection

from anabranch.protocol.frames import encode_request
from anabranch.protocol.messages.api_versions import ApiVersionsRequest
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from benchmarks.harness import Bar, Result, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from tests.fuzz.frames import Maker, Senders
from tests.support.wire import WireClient, batch

TOPIC, WIDE = "honest", "wide"
WIDE_PARTITIONS = 2_000
PIPELINING, AT_ONCE = 100, 200
SILENT, ASKED = 300, 30
REQUESTS, REQUESTS_SMALL = 3_000, 40
PAUSE_S = 0.002
SEED = 7
P99_MAX_MS = 50.0
TIMEOUT_S = 60.0
Attack = Callable[[int, Connection], None]


def _frame(message: object) -> bytes:
    return b"".join(bytes(part) for part in encode_request(message, 0, 1, "hostile"))


def _frames(port: int, orders: Connection) -> None:
    senders = Senders(port, Maker(SEED))
    with contextlib.closing(senders):
        senders.send(100)
        orders.send(None)
        while not orders.poll(0):
            senders.send(200)


def _pipelining(port: int, orders: Connection) -> None:
    asked = _frame(ApiVersionsRequest()) * AT_ONCE
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S)) for _ in range(PIPELINING)
        ]
        for each in opened:
            each.setblocking(False)
        orders.send(None)
        left = dict.fromkeys(opened, memoryview(asked))
        while not orders.poll(0):
            for each in opened:
                with contextlib.suppress(BlockingIOError):
                    each.recv(1 << 20)
                with contextlib.suppress(BlockingIOError):
                    left[each] = left[each][each.send(left[each]) :] or memoryview(asked)


def _silent(port: int, orders: Connection) -> None:
    asked = _frame(MetadataRequest(topics=[MetadataRequestTopic(name=WIDE)])) * ASKED

    def ask() -> socket.socket:
        made = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        made.setblocking(False)
        made.send(asked)
        return made

    opened = [ask() for _ in range(SILENT)]
    orders.send(None)
    while not orders.poll(1.0):
        for place, each in enumerate(opened):
            try:
                each.send(asked)
            except BlockingIOError:
                pass
            except OSError:  # The broker has closed it.
                each.close()
                opened[place] = ask()
    for each in opened:
        each.close()


def _attack(attack: Attack, port: int, orders: Connection) -> None:
    os.nice(19)
    attack(port, orders)


@contextlib.contextmanager
def _attacked(attack: Attack, port: int) -> Iterator[None]:
    """Attack the broker meanwhile."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_attack, args=(attack, port, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(TIMEOUT_S), "the attack does not begin"
        ours.recv()
        yield
    finally:
        ours.send(None)
        process.join(TIMEOUT_S)
        process.kill()


def _honest(port: int, requests: int) -> Mapping[str, float]:
    """Produce and fetch in turn; the milliseconds that a request takes."""
    produced: list[float] = []
    fetched: list[float] = []
    records = batch([b"x" * 100])
    with WireClient(port, TIMEOUT_S) as client:
        for _ in range(requests):
            began = time.monotonic()
            answer = client.produce(TOPIC, 0, records)
            then = time.monotonic()
            assert answer.error_code == 0, answer
            found = client.fetch(TOPIC, 0, answer.base_offset)
            fetched.append(time.monotonic() - then)
            produced.append(then - began)
            assert found.error_code == 0 and found.records, found
            time.sleep(PAUSE_S)
    return {
        f"{name}_{figure}": 1000 * statistics.quantiles(took, n=100)[place]
        for name, took in (("produce", produced), ("fetch", fetched))
        for figure, place in (("p50", 49), ("p99", 98))
    }


def _beside(attack: Attack, what: str, name: str, scale: Scale) -> list[Result]:
    requests = scale.choose(REQUESTS, REQUESTS_SMALL)
    with Anabranch(settings={"durability": "os"}) as broker:
        with WireClient(broker.port, TIMEOUT_S) as client:
            client.create(TOPIC)
            client.create(WIDE, WIDE_PARTITIONS)

        def attacked() -> Mapping[str, float]:
            with _attacked(attack, broker.port):
                return _honest(broker.port, requests)

        limits = dict.fromkeys(("produce_p99", "fetch_p99"), P99_MAX_MS)
        figures = ("produce_p50", "produce_p99", "fetch_p50", "fetch_p99")
        told = f"{requests} times a record produced and fetched again, one client, durability=os, {what}"
        found = compare(
            name,
            what=told,
            sides={"attacked": attacked, "quiet": lambda: _honest(broker.port, requests)},
            bars=[Bar(figure, "ms", "less") for figure in figures],
            scale=scale,
        )
        found += compare(
            f"{name}_limit",
            what=told,
            sides={"attacked": attacked, "limit": lambda: limits},
            bars=[Bar(figure, "ms", "less", 1.0) for figure in limits],
            scale=scale,
        )
        return found


def frames(scale: Scale) -> list[Result]:
    """An honest client beside hostile frames of every API."""
    return _beside(_frames, "beside hostile frames", "beside.frames", scale)


def pipelining(scale: Scale) -> list[Result]:
    """An honest client beside 100 that send hundreds of small requests at once."""
    what = f"beside {PIPELINING} connections that send {AT_ONCE} ApiVersions at once, again and again"
    return _beside(_pipelining, what, "beside.pipelining", scale)


def silent(scale: Scale) -> list[Result]:
    """An honest client beside 300 that ask for much and read nothing."""
    what = f"beside {SILENT} connections that ask {ASKED} times for {WIDE_PARTITIONS} partitions and read nothing"
    return _beside(_silent, what, "beside.silent", scale)


BENCHMARKS = {"frames": frames, "pipelining": pipelining, "silent": silent}
