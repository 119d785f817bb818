"""Members of a group that share partitions: real brokers, real member processes, from the applications' edge.

Every record carries its number among the records of its key. What each member was handed is in a file of its own, one
line for each record, written before the record counts as processed.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client import (
    Admin,
    AssignmentSpec,
    Consumer,
    GroupAssignment,
    MemberAssignment,
    OffsetAndMetadata,
    PartitionAssignor,
    Producer,
    TopicIdPartition,
    TopicPartition,
)
from anabranch.client import sync as plain
from anabranch.machines.keyspace import SPACE, Interval, cuts, spread
from anabranch.machines.placement import place
from anabranch.records.hashing import murmur2, placement_hash
from tests.support import commands
from tests.support.broker import BrokerProcess, running
from tests.support.examples import python_examples
from tests.support.thorough import THOROUGH

QUICK = {
    "group.consumer.session.timeout.ms": 8_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.min.heartbeat.interval.ms": 100,
}
ACCEPTS = {"accept.range.fetch": "true"}
KEYS = 200


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data"), **QUICK) as process:
        yield process


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


class Sender:
    """Numbered records of unequal keys: of low keys there are many more."""

    def __init__(self, address: str, topic: str, seed: int = 1) -> None:
        self.address, self.topic = address, topic
        self.sent: dict[bytes, int] = defaultdict(int)
        self._chance = random.Random(seed)

    async def send(self, count: int, producer: Producer) -> None:
        for _ in range(count):
            key = b"k%d" % int(KEYS * self._chance.random() ** 3)
            await producer.send(self.topic, b"%d" % self.sent[key], key=key)
            self.sent[key] += 1

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Send some records at once, and 200 a second all the time."""

        async def flow() -> None:
            async with Producer(self.address, linger_ms=2) as producer:
                await self.send(1_000, producer)
                while not ends.is_set():
                    await self.send(20, producer)
                    await asyncio.sleep(0.1)

        ends = asyncio.Event()
        sending = asyncio.create_task(flow())
        try:
            yield
        finally:
            ends.set()
            await sending

    @property
    def total(self) -> int:
        return sum(self.sent.values())


async def create(address: str, topic: str, partitions: int, **configs: str) -> None:
    async with Admin(address) as admin:
        await admin.create_topics(topic, partitions=partitions, configs={**ACCEPTS, **configs})


async def read_some(consumer: Consumer, count: int, timeout_s: float = 20.0) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline:
        found += await consumer.poll(0.2, max_records=count - len(found))
    return found


# -- by hand: a group_id, and shares that the application assigns ------------------------------------------------------


def test_a_share_that_is_assigned_by_hand_goes_on_where_its_keys_were_committed(address: str) -> None:
    asyncio.run(_by_hand(address))


async def _by_hand(address: str) -> None:
    await create(address, "by-hand", 1)
    sender = Sender(address, "by-hand")
    async with Producer(address) as producer:
        await sender.send(400, producer)
    low, high = cuts(SPACE, 2)
    settings: dict[str, Any] = {"group_id": "by-hand", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    seen: dict[tuple[int, bytes], int] = defaultdict(int)

    def note(records: list[Any]) -> None:
        for record in records:
            seen[record.offset, record.key] += 1

    async with Consumer(address, **settings) as one, Consumer(address, **settings) as two:
        one.assign({("by-hand", 0): [low]})
        two.assign({("by-hand", 0): [high]})
        note(await read_some(one, 50))
        note(await read_some(two, 20))
        await one.commit()
        await two.commit()
        committed = (await one.committed())[TopicPartition("by-hand", 0)]
        assert committed is not None
        assert [share[:2] for share in committed.shares] == [low, high]
        assert committed.offset == min(share[2] for share in committed.shares)
        assert committed.shares[0][2] != committed.shares[1][2]
    async with Consumer(address, **settings) as other:  # The shares of both, and the whole again.
        middle = (low.start + low.size // 2, high.start + high.size // 2)
        other.assign({("by-hand", 0): [middle]})
        found = await read_some(other, 60)
        note(found)
        await other.commit()
    async with Consumer(address, **settings) as whole:
        whole.assign([("by-hand", 0)])
        note(await read_some(whole, 400, 5.0))
        await whole.commit()
        committed = (await whole.committed())[TopicPartition("by-hand", 0)]
        assert committed is not None and committed.offset == 400 and not committed.shares
    assert len(seen) == 400
    assert set(seen.values()) == {1}, "a record was handed out twice, although its offset was committed"


def test_a_range_has_the_keys_at_its_bounds_and_none_beyond(address: str) -> None:
    asyncio.run(_at_the_bounds(address))


async def _at_the_bounds(address: str) -> None:
    await create(address, "bounds", 1)
    keys = sorted((b"k%d" % number for number in range(9)), key=lambda key: spread(murmur2(key), 1))
    places = [spread(murmur2(key), 1) for key in keys]
    async with Producer(address) as producer:
        for key in keys:
            await producer.send("bounds", b"", key=key)
    settings: dict[str, Any] = {"group_id": "bounds", "auto_offset_reset": "earliest", "enable_auto_commit": False}
    for low, high, wanted in ((places[3], places[5], keys[3:6]), (places[3] + 1, places[5] - 1, keys[4:5])):
        async with Consumer(address, **settings) as consumer:
            consumer.assign({("bounds", 0): [(low, high)]})
            found = await read_some(consumer, len(wanted) + 1, 2.0)
            assert [record.key for record in found] == wanted


def test_a_member_cannot_commit_the_keys_of_another(address: str) -> None:
    asyncio.run(_foreign_keys(address))


async def _foreign_keys(address: str) -> None:
    await create(address, "foreign", 1)
    sender = Sender(address, "foreign")
    async with Producer(address) as producer:
        await sender.send(200, producer)
    settings: dict[str, Any] = {
        "group_id": "foreign",
        "group_protocol": "consumer",
        "allow_key_share": True,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "default_api_timeout_ms": 2_000,
    }
    tp = TopicPartition("foreign", 0)
    async with Consumer(address, **settings) as one, Consumer(address, **settings) as two:
        held: dict[Consumer, Any] = {}
        for consumer in (one, two):
            note = partial(held.__setitem__, consumer)
            consumer.subscribe(["foreign"], on_partitions_assigned=note, on_partitions_revoked=lambda units: None)
        deadline = time.monotonic() + 20
        while len(held) < 2 and time.monotonic() < deadline:
            await one.poll(0.2, max_records=1)
            await two.poll(0.2, max_records=1)
        (theirs,) = held[two][tp]
        foreign = {tp: OffsetAndMetadata(0, shares=[(theirs[0], theirs[1], 200)])}
        with pytest.raises(ApiError) as refused:
            await one.commit(foreign)
        assert refused.value.code is ErrorCode.STALE_MEMBER_EPOCH
        committed = (await one.committed(tp))[tp]
        assert committed is None or all(offset < 200 for _, _, offset in committed.shares)


# -- the examples of the document -------------------------------------------------------------------------------------


class EnoughError(Exception):
    """Ends an example that would go on for ever."""


def example(address: str, part: str) -> CodeType:
    (found,) = (each for each in python_examples("docs/cooperative.md", address) if part in each)
    return compile(found, "docs/cooperative.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def create_orders(address: str) -> None:
    async with Admin(address) as admin:
        there = "orders" in await admin.list_topics()
    if not there:
        await create(address, "orders", 2)


def test_the_example_of_shares_in_a_group_tells_its_keys_and_prints_records(address: str) -> None:
    asyncio.run(create_orders(address))
    told: list[str] = []

    def send() -> None:
        """Send until one is printed: a consumer that begins at the end passes over what came before it looked."""
        with plain.Producer(address) as producer:
            while "b'shoes' b'9'" not in told:
                producer.send("orders", b"9", key=b"shoes")
                producer.flush()
                time.sleep(0.05)

    def note(*words: Any) -> None:
        told.append(" ".join(map(str, words)))
        if "assigned:" in words:
            senders.append(threading.Thread(target=send))
            senders[-1].start()
        elif "revoked:" not in words:
            raise EnoughError

    senders: list[threading.Thread] = []
    with pytest.raises(EnoughError):
        exec(example(address, "class Told"), {"print": note})
    for sender in senders:
        sender.join()
    assert any("assigned: all keys" in line for line in told)
    assert "b'shoes' b'9'" in told


def test_the_example_of_a_share_by_hand_reads_its_third(address: str) -> None:
    async def run() -> None:
        await create_orders(address)
        names: dict[str, Any] = {}
        reading = asyncio.ensure_future(eval(example(address, "cuts(SPACE, 3)"), names))
        async with Producer(address) as producer, asyncio.timeout(60):
            await producer.send("orders", b"1", key=b"some key")
            while "record" not in names and not reading.done():
                await producer.send("orders", b"1", key=b"%d" % random.randrange(1000))
                await asyncio.sleep(0.02)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled(), reading.exception()
        assert names["first"].start <= spread(murmur2(names["record"].key), 2) <= names["first"].end

    asyncio.run(run())


def test_the_examples_of_a_filter_and_of_records_by_hand(address: str) -> None:
    async def run() -> None:
        await create(address, "mails", 1)
        sent: list[bytes] = []

        async def send(record: Any) -> bool:
            sent.append(record.key)
            if len(sent) == 3:
                raise EnoughError
            return True

        async with Producer(address) as producer, Consumer(address, auto_offset_reset="earliest") as consumer:
            consumer.assign("mails")
            names = {"consumer": consumer, "Consumer": partial(Consumer, auto_offset_reset="earliest"), "sent": send}
            for key in (b"k0", b"k1", b"k2"):
                await producer.send("mails", b"1", key=key)
            await producer.flush()
            await eval(example(address, "import RecordFilter"), names)
            assert [record.key for record in names["records"]] == [b"k1", b"k2"]
        with pytest.raises(EnoughError):
            await eval(example(address, "acknowledgement_mode"), names)
        assert sent == [b"k0", b"k1", b"k2"]

    asyncio.run(run())


def test_the_example_of_cooperative_fetch_makes_its_thumbnails(address: str) -> None:
    asyncio.run(create(address, "images", 1))
    with plain.Producer(address) as producer:
        for number in range(20):
            producer.send("images", b"%d" % number)
    made: set[int] = set()

    async def make_thumbnail(record: Any) -> None:
        made.add(record.offset)
        if len(made) == 20:
            raise EnoughError

    with pytest.raises(EnoughError):
        exec(example(address, "make_thumbnail"), {"make_thumbnail": make_thumbnail})


# -- in a group: real processes ----------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A record that was processed."""

    time_ns: int
    member: str
    partition: int
    offset: int
    key: str
    number: int

    def of(self, process: str) -> bool:
        """Whether a member of a process has processed it."""
        return self.member.startswith(process)


class Processes:
    """The processes of a group's members, and what they have processed."""

    def __init__(self, address: str, topic: str, path: Path) -> None:
        self._address, self._topic, self._path = address, topic, path
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: set[str] = set()

    def start(self, *modes: str) -> str:
        name = f"p{len(self._running)}"
        command = [sys.executable, "-m", "tests.support.share_worker", self._address, self._topic, self._topic]
        self._running[name] = subprocess.Popen([*command, str(self._path / name), *modes])
        return name

    def kill(self, name: str) -> None:
        self._running[name].send_signal(signal.SIGKILL)
        self._running[name].wait()
        self.killed.add(name)

    def stop(self, name: str) -> None:
        self._running[name].terminate()
        assert self._running[name].wait(60) == 0

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def lines(self) -> list[Line]:
        found: list[Line] = []
        for file in sorted(self._path.iterdir()):
            text = file.read_bytes()
            found += [Line(*json.loads(line)) for line in text[: text.rfind(b"\n") + 1].splitlines()]
        return sorted(found)

    async def until(self, holds: Callable[[list[Line]], bool], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds(self.lines()):
            for name, process in self._running.items():
                assert name in self.killed or process.poll() in (None, 0), f"{name} has failed"
            assert time.monotonic() < deadline, f"{len(self.lines())} records"
            await asyncio.sleep(0.3)


def check(lines: list[Line], sent: dict[bytes, int], killed: set[str]) -> None:
    """Every record was processed, each key in order, and twice only what a member had that was killed or fenced."""
    of_key: dict[str, list[Line]] = defaultdict(list)
    fenced: dict[str, int] = {}
    for line in lines:
        if line.partition < 0:
            fenced[line.member] = line.time_ns
        else:
            of_key[line.key].append(line)
    assert of_key.keys() == {key.decode() for key in sent}
    for key, all_of_it in of_key.items():
        last: dict[int, Line] = {}
        for line in all_of_it:
            before = last.get(line.number)
            if before is None:
                assert line.number == len(last), f"{key}: {line} after {len(last) - 1}"
            else:
                assert any(map(before.of, killed)), f"{before} came again: {line}"
            last[line.number] = line
        assert len(last) == sent[key.encode()]


def everything(sender: Sender) -> Callable[[list[Line]], bool]:
    return lambda lines: len({line[2:4] for line in lines if line.partition >= 0}) >= sender.total


def test_four_members_share_one_partition(address: str, tmp_path: Path) -> None:
    """Some join later, some are killed, some leave: each record is processed, each key in order."""
    asyncio.run(_four(address, Processes(address, "four", tmp_path)))


async def _four(address: str, processes: Processes) -> None:
    await create(address, "four", 1)
    sender = Sender(address, "four")
    try:
        async with sender.flowing():
            first = processes.start("poll", "run")
            await processes.until(lambda lines: len(lines) > 300)
            second = processes.start("arrow", "run")
            await processes.until(lambda lines: sum(line.of(second) for line in lines) > 300)
            processes.kill(first)
            third = processes.start("poll", "arrow")
            await processes.until(lambda lines: sum(line.of(third) for line in lines) > 300)
            processes.stop(second)
            await processes.until(lambda lines: sum(line.of(third) for line in lines) > 600)
        await processes.until(everything(sender))
        processes.stop(third)
    finally:
        processes.end()
    check(processes.lines(), sender.sent, processes.killed)


@pytest.mark.skipif(not THOROUGH, reason="fifteen members in five processes take a minute: make conformance")
def test_twelve_members_share_three_partitions_through_kills_and_resizes(address: str, tmp_path: Path) -> None:
    asyncio.run(_twelve(address, Processes(address, "twelve", tmp_path)))


async def _twelve(address: str, processes: Processes) -> None:
    await create(address, "twelve", 3, **{"enable.ordered.delivery": "true"})
    sender = Sender(address, "twelve")
    modes = ("poll", "run", "arrow")
    try:
        async with sender.flowing(), Admin(address) as admin:
            names = [processes.start(*modes) for _ in range(4)]
            await processes.until(lambda lines: len({line.member for line in lines}) == 12)
            await admin.resize("twelve", 5)
            await processes.until(lambda lines: {line.partition for line in lines} >= set(range(5)))
            processes.kill(names[0])
            names.append(processes.start(*modes))
            await processes.until(lambda lines: sum(line.of(names[4]) for line in lines) > 100)
            await admin.resize("twelve", 4)
            processes.kill(names[1])
            count = len(processes.lines())
            await processes.until(lambda lines: len(lines) > count + 500)
        await processes.until(everything(sender))
        for name in names[2:]:
            processes.stop(name)
    finally:
        processes.end()
    check(processes.lines(), sender.sent, processes.killed)


def test_a_topic_that_is_not_to_be_shared_any_more_goes_to_whole_owners_and_kills_nobody(address: str) -> None:
    """Members with a part raised TOPIC_RANGE_FETCH_NOT_ALLOWED before they heard of their new assignment."""
    asyncio.run(switched_off(address, "switched-off"))


async def switched_off(address: str, topic: str) -> None:
    await create(address, topic, 1)
    sender = Sender(address, topic)
    settings: dict[str, Any] = {"group_id": topic, "allow_key_share": True, "auto_offset_reset": "earliest"}
    async with (
        Admin(address) as admin,
        Producer(address) as producer,
        Consumer(address, **settings) as first,
        Consumer(address, **settings) as second,
    ):
        seen: dict[bytes, list[int]] = defaultdict(list)

        async def read_until(true: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 30
            while not true():
                assert time.monotonic() < deadline, (first.key_ranges(), second.key_ranges(), len(seen))
                for consumer in (first, second):
                    for record in await consumer.poll(0.05):
                        assert record.key is not None and record.value is not None
                        seen[record.key].append(int(record.value))

        def total() -> int:
            return sum(len(set(numbers)) for numbers in seen.values())

        for consumer in (first, second):
            consumer.subscribe(topic)
        await sender.send(300, producer)
        await read_until(lambda: all(len(it.key_ranges().get((topic, 0), ())) == 1 for it in (first, second)))
        await admin.alter_configs("topic", topic, {"accept.range.fetch": "false"})
        await sender.send(300, producer)
        await read_until(lambda: total() == sender.total)
        await read_until(lambda: [it.key_ranges() for it in (first, second)].count({}) == 1)
        for numbers in seen.values():
            firsts = list(dict.fromkeys(numbers))
            assert firsts == sorted(firsts)


def keys_of_halves() -> tuple[list[bytes], list[bytes]]:
    """Two keys of each half of the key space."""
    found: tuple[list[bytes], list[bytes]] = ([], [])
    number = 0
    while min(map(len, found)) < 2:
        key = b"k%d" % number
        found[int(place(placement_hash(key), 1, 2))].append(key)
        number += 1
    return found


@pytest.mark.parametrize("leaves", [False, True])
def test_what_a_sharer_has_finished_behind_a_gate_opens_it_for_no_other_keys(address: str, leaves: bool) -> None:
    """Neither for those of a member that waits there, nor for those that it is given itself when that one leaves."""
    asyncio.run(_behind_a_gate(address, f"behind-a-gate-{leaves}", leaves=leaves))


async def _behind_a_gate(address: str, topic: str, *, leaves: bool) -> None:
    lower, upper = keys_of_halves()
    await create(address, topic, 1)
    async with Admin(address) as admin, Producer(address) as producer:
        for count, keys in ((0, (lower[0], upper[0])), (2, (upper[1],)), (1, (lower[1], upper[1]))):
            if count:
                await admin.resize(topic, count)
            for key in keys:
                await (await producer.send(topic, b"v", key=key))
    said: dict[str, Any] = {"allow_key_share": True, "acknowledgement_mode": "explicit", "enable_auto_commit": False}
    made = [Consumer(address, group_id=topic, auto_offset_reset="earliest", **said) for _ in range(2)]
    shared, later = TopicPartition(topic, 0), TopicPartition(topic, 1)
    handed: dict[tuple[int, int], tuple[Consumer, Any]] = {}

    async def read(*consumers: Consumer) -> None:
        for consumer in consumers:
            for record in await consumer.poll(0.05):
                handed[record.partition, record.offset] = consumer, record

    async def until(what: Callable[[], bool], *consumers: Consumer) -> None:
        while not what():
            await read(*consumers)

    def finish(offset: int, partition: int = 0) -> None:
        consumer, record = handed[partition, offset]
        assert consumer.done(record)

    def pausing(consumer: Consumer) -> Callable[[Collection[TopicPartition]], Awaitable[None]]:
        async def pause(partitions: Collection[TopicPartition]) -> None:
            if later in partitions and is_paused:
                await consumer.pause(later)

        return pause

    is_paused = True
    async with made[0], made[1], asyncio.timeout(60):
        for consumer in made:
            consumer.subscribe(topic, on_partitions_assigned=pausing(consumer))
        await until(lambda: all(len(it.key_ranges().get(shared, ())) == 1 for it in made), *made)
        await until(lambda: {(0, 0), (0, 1), (0, 2)} <= handed.keys(), *made)
        one, other = handed[0, 2][0], handed[0, 1][0]
        assert one is not other and handed[0, 0][0] is one
        finish(2)
        await one.commit()
        if leaves:
            await other.close()
            del handed[0, 1]
            await until(lambda: not one.key_ranges()[shared], one)
            await until(lambda: (0, 1) in handed, one)
        left = [one] if leaves else made
        finish(1)
        for consumer in left:
            await consumer.commit()
        finish(0)
        for _ in range(3):
            for consumer in left:
                await consumer.commit()
            for _ in range(5):
                await read(*left)
        assert (0, 3) not in handed, "the record before it is in the partition that is paused"
        is_paused = False
        for consumer in left:
            if later in consumer.assignment():
                await consumer.resume(later)
        await until(lambda: (1, 0) in handed, *left)
        assert (0, 3) not in handed
        finish(0, partition=1)
        while (0, 3) not in handed:
            for consumer in left:
                await consumer.commit()
            await read(*left)


def test_two_commands_share_a_partition_by_ranges_of_keys(broker: BrokerProcess) -> None:
    asyncio.run(create(broker.address, "commands", 1))
    words = ("consume", "commands", "--group", "commands", "--share", "keys", "--format", "value")
    environment = {**os.environ, "ANABRANCH_BOOTSTRAP_SERVERS": broker.address}
    command = [sys.executable, "-m", "anabranch.cli", *words]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    try:
        deadline, shared = time.monotonic() + 60, False
        with plain.Admin(broker.address) as admin:
            while not shared:
                assert time.monotonic() < deadline
                time.sleep(0.2)
                with suppress(ApiError):  # There is no group yet.
                    members = admin.describe_groups("commands")["commands"].members
                    shared = [len(member.key_ranges) for member in members] == [1, 1]

        async def fill() -> None:
            async with Producer(broker.address) as producer:
                for number in range(200):
                    await producer.send("commands", b"%d" % number, key=b"k%d" % number)

        asyncio.run(fill())
        lag = -1
        while lag != 0:
            assert time.monotonic() < deadline
            ((row,),) = (it["offsets"] for it in commands.document(broker.address, "group", "describe", "commands"))
            lag = row["lag"]
            time.sleep(0.2)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        printed = [[*map(int, process.communicate(timeout=30)[0].split())] for process in processes]
    assert min(map(len, printed)) > 20
    assert sorted(printed[0] + printed[1]) == list(range(200))


class Cutting(PartitionAssignor):
    """Gives every member that shares a part of every partition."""

    name = "cutting"

    def __init__(self) -> None:
        self.specs: list[AssignmentSpec] = []
        self.told: list[MemberAssignment] = []

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        self.specs.append(spec)
        found: dict[str, dict[TopicIdPartition, list[Interval]]] = {name: {} for name in spec.members}
        sharers = sorted(name for name, member in spec.members.items() if member.allow_key_share)
        for topic_id, topic in spec.topics.items():
            for number in range(topic.partition_count):
                some = sharers[: topic.shares_max]
                for name, part in zip(some, cuts(topic.intervals[number], len(some)), strict=True):
                    found[name][TopicIdPartition(topic_id, number)] = [part]
        return GroupAssignment(
            {name: MemberAssignment(frozenset(parts), key_ranges=parts) for name, parts in found.items()}
        )

    def on_assignment(self, error: int, assignment: MemberAssignment, member_epoch: int) -> None:
        self.told.append(assignment)


def test_an_assignor_of_the_members_shares_partitions(address: str) -> None:
    assignors = [Cutting(), Cutting()]

    async def read() -> None:
        topic = "cut-by-members"
        await create(address, topic, 1)
        said: dict[str, Any] = {"group_id": topic, "allow_key_share": True, "auto_offset_reset": "earliest"}
        seen: list[list[bytes | None]] = [[], []]
        async with (
            Producer(address) as producer,
            Consumer(address, group_local_assignors=assignors[:1], **said) as first,
            Consumer(address, group_local_assignors=assignors[1:], **said) as second,
        ):
            for consumer in (first, second):
                consumer.subscribe(topic)
            deadline = time.monotonic() + 30

            async def read_until(true: Callable[[], bool]) -> None:
                while not true():
                    assert time.monotonic() < deadline, (first.key_ranges(), second.key_ranges(), seen)
                    for consumer, values in zip((first, second), seen, strict=True):
                        values += [record.value for record in await consumer.poll(0.05)]

            halves = sorted((it,) for it in cuts(SPACE, 2))
            await read_until(
                lambda: sorted(tuple(it.key_ranges().get((topic, 0), ())) for it in (first, second)) == halves
            )
            for number in range(200):
                await producer.send(topic, b"%d" % number, key=b"k%d" % number)
            await read_until(lambda: len(seen[0]) + len(seen[1]) >= 200)
        assert sorted(int(value or b"") for value in seen[0] + seen[1]) == list(range(200))
        assert min(map(len, seen)) > 50

    asyncio.run(read())
    last = max((spec for it in assignors for spec in it.specs), key=lambda spec: (len(spec.members), spec.group_epoch))
    assert [member.allow_key_share for member in last.members.values()] == [True, True]
    assert any(ranges for it in assignors for told in it.told for ranges in told.key_ranges.values())
