"""What the broker sets aside for good is freed by reference counts: a complete collection finds no cycle of its own.

Such a collection is one long step (`runtime.collector`), so that none may be needed beside clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.describe_producers import DescribeProducersRequest, TopicRequest
from anabranch.server.broker import Broker
from anabranch.server.settings import Address, Settings
from anabranch.storage.metadata import embedded
from tests.fuzz.frames import Maker, Senders, make_coordinators
from tests.support.group_client import GroupClient
from tests.support.wire import WireClient, batch

TOPIC, WIDE = "t", 300
ROUNDS = 12
FRAMES, LONG, HANG_UPS = 2_000, 30_000, 5


def work(port: int) -> None:
    """Make and end what lives long: topics, partitions, connections, groups, members, waits, producers."""
    with GroupClient(port, 60) as client:
        client.create(TOPIC, 3)
        client.create("wide", WIDE)
        client.ready("g")
        producer = client.producer_id()
        for number in range(ROUNDS):
            client.create(f"n{number}", 2)
            client.produce(f"n{number}", 0, batch([b"x" * 100] * 20, producer=(producer, 0, 0)))
            client.produce(TOPIC, number % 3, batch([b"x" * 100] * 20))
            client.resize(TOPIC, 3 + number % 3)
            for member in range(5):
                assert not client.beat("g", f"m{member}", 0, topics=[TOPIC]).error_code
            client.join(f"classic{number}")
            client.commit("other", {(TOPIC, 0): number})
            for member in range(5):
                client.beat("g", f"m{member}", -1)
            with WireClient(port) as waiting:  # It hangs up while its fetch waits.
                waiting.send(waiting.fetch_request(TOPIC, {0: 10_000}, wait_ms=20), 12)
            with WireClient(port) as hostile:
                hostile.sock.sendall(b"\0\0\0\x10" + bytes(range(16)))
            client.delete(f"n{number}")
        client.delete("wide")


def attack(port: int) -> None:
    """Send frames that are refused in the loop and in threads, and hang up while others are worked on."""
    with WireClient(port, 60) as client:
        client.create(TOPIC, WIDE)
        make_coordinators(client)
    maker = Maker(seed=5)
    maker.begin(0)
    with contextlib.closing(Senders(port, maker)) as senders:
        senders.send(FRAMES)
    topics = [TopicRequest(name=f"n{number}", partition_indexes=[0]) for number in range(LONG)]
    for _ in range(HANG_UPS):
        with WireClient(port) as client:
            client.send(DescribeProducersRequest(topics=topics), 0)
            time.sleep(0.1)  # It is decoded in a thread, and being answered.


def wait(port: int) -> None:
    """Wait for records, and hang up while waiting, for longer than the objects of a wait stay young."""
    with WireClient(port, 60) as client:
        client.create(TOPIC, 3)
        for _ in range(3):
            client.call(client.fetch_request(TOPIC, {0: 0, 1: 0}, wait_ms=200), 12)
    for _ in range(3):
        with WireClient(port) as client:
            client.send(client.fetch_request(TOPIC, {0: 0, 1: 0}, wait_ms=10_000), 12)
            time.sleep(0.2)


def refused(port: int) -> None:
    """Ask for what needs the metadata store, which refuses."""
    with pytest.MonkeyPatch.context() as patch, GroupClient(port, 60) as client:
        patch.setattr(embedded._Database, "multi", _refuse)
        topics = [CreatableTopic(name="refused", num_partitions=5, replication_factor=1)]
        assert client.call(CreateTopicsRequest(topics=topics, timeout_ms=1_000)).topics[0].error_code
        assert client.find("g").coordinators[0].error_code


def _refuse(database: object, operations: object) -> None:
    raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("work", [work, attack, wait, refused], ids=["clients", "hostile", "waiting", "refused"])
def test_no_cycle_of_the_brokers_own_is_left_for_a_complete_collection(
    work: Callable[[int], None], tmp_path: Path
) -> None:
    async def story() -> Counter[str]:
        settings = Settings(
            listeners=Address("127.0.0.1", 0),
            metrics_listener=None,
            log_dirs=tmp_path / "data",
            durability="os",
            group_initial_rebalance_delay_ms=0,
        )
        broker = Broker(settings)
        gc.freeze()
        gc.disable()  # Or collections would find some of it, before they set the rest aside.
        try:
            await broker.start()
            failures: list[BaseException] = []

            def run() -> None:
                try:
                    work(broker.address.port)
                except BaseException as error:
                    failures.append(error)

            client = threading.Thread(target=run)
            client.start()
            while client.is_alive():
                await asyncio.sleep(0.05)
            assert not failures, failures
            await asyncio.sleep(0.2)
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                gc.collect()
                found = Counter(type(each).__qualname__ for each in gc.garbage if is_ours(each))
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
        finally:
            gc.enable()
            gc.unfreeze()
        await broker.stop()
        return found

    gc.collect()
    assert asyncio.run(story()) == {}


def is_ours(thing: object) -> bool:
    """Whether a thing is one of the broker's objects."""
    return type(thing).__module__.startswith("anabranch.")
