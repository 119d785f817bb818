"""Tables at a real broker: members that come, go, die and sleep, resizes under load; each booking counts once.

A balance tells of how many bookings it is, and bookings of an account are numbered: a member that finds a balance that
is not that of exactly the bookings before says so. In the end the changelog has the sums.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from anabranch.client import Admin, Consumer, Producer, TopicPartition
from tests.support.broker import BrokerProcess, running
from tests.support.thorough import THOROUGH
from tests.support.worker_process import WorkerProcess

QUICK = {
    "group.consumer.session.timeout.ms": 3_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 200,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.initial.rebalance.delay.ms": 0,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
}
ACCOUNTS = [b"account-%d" % number for number in range(40)]
TIMEOUT_S = 90


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data"), **QUICK) as process:
        yield process


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


class Member(WorkerProcess):
    """A member in a process of its own."""

    def __init__(self, address: str, topic: str, *, parallel: int = 0, retry_s: float = 0.02, **settings: Any) -> None:
        self.told: list[dict[str, Any]] = []
        plan = {
            "address": address,
            "topic": topic,
            "changelog": f"{topic}-balances",
            "group": topic,
            "parallel": parallel,
            "retry_s": retry_s,
            "settings": settings,
        }
        super().__init__([sys.executable, "-m", "tests.support.table_worker", json.dumps(plan)])

    def said(self, event: dict[str, Any]) -> None:
        self.told.append(event)

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """The balances that were not those of the bookings before."""
        return [event for event in self.told if event["event"] == "wrong"]


class Bookings:
    """Sends bookings; knows the balances that must come of them."""

    def __init__(self, address: str, topic: str) -> None:
        self.topic = topic
        self.balances: dict[bytes, tuple[int, int]] = dict.fromkeys(ACCOUNTS, (0, 0))
        self._address = address
        self._number = 0

    async def send(self, count: int, per_s: int = 1_500) -> None:
        async with Producer(self._address, linger_ms=5) as producer:
            for _ in range(count // 50):
                for _ in range(50):
                    account = ACCOUNTS[self._number * 7 % len(ACCOUNTS)]
                    amount = self._number % 23 - 9
                    before, total = self.balances[account]
                    await producer.send(self.topic, f"{before} {amount}", key=account)
                    self.balances[account] = before + 1, total + amount
                    self._number += 1
                await asyncio.sleep(50 / per_s)

    @property
    def expected(self) -> dict[bytes, bytes]:
        return {account: b"%d %d" % balance for account, balance in self.balances.items() if balance[0]}


async def changelog_of(address: str, topic: str) -> dict[bytes, bytes]:
    """Return the committed entries."""
    found: dict[bytes, bytes] = {}
    async with Consumer(address, isolation_level="read_committed", auto_offset_reset="earliest") as consumer:
        consumer.assign(topic)
        ends = await consumer.end_offsets()
        while any([await consumer.position(*tp) < end for tp, end in ends.items()]):
            for record in await consumer.poll(0.2):
                assert record.key is not None
                if record.value is None:
                    found.pop(record.key, None)
                else:
                    found[record.key] = record.value
    return found


async def eventually(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.2)


async def processed(address: str, topic: str) -> bool:
    """Whether the group has committed all of the topic."""
    async with Admin(address) as admin:
        ends = await admin.topic_offsets(topic)
        committed = await admin.list_group_offsets(topic)
        return all(
            span.start == span.end
            or ((at := committed.get(TopicPartition(topic, number))) is not None and at.offset >= span.end)
            for number, span in ends.items()
        )


def test_each_booking_counts_once_through_crashes_and_resizes(address: str) -> None:
    asyncio.run(through_crashes_and_resizes(address, "bookings", (0, 0, 8)))


@pytest.mark.skipif(not THOROUGH, reason="make conformance; the next test has the rule")
def test_each_booking_counts_once_also_where_members_share_partitions(address: str) -> None:
    """Ranges of keys leave members that have changed more than is committed, as some records are done late."""
    asyncio.run(through_crashes_and_resizes(address, "shared-bookings", (8, 8, 8, 0, 8), allow_key_share=True))


def test_each_booking_counts_once_where_ranges_go_and_come_back(address: str) -> None:
    asyncio.run(through_joins_and_leaves(address, "moving-bookings"))


async def through_joins_and_leaves(address: str, topic: str) -> None:
    """Ranges leave members whose committed offset is behind what they have changed, and come back to them."""
    async with Admin(address) as admin:
        await admin.create_topics(topic, partitions=1, configs={"accept.range.fetch": "true"})

    def member() -> Member:
        return Member(address, topic, parallel=8, retry_s=0.4, allow_key_share=True)

    members = [member(), member()]
    try:
        bookings = Bookings(address, topic)
        await bookings.send(500)
        await eventually(lambda: started(members), "the members did not start")
        sending = asyncio.create_task(bookings.send(8_000, per_s=600))
        for _ in range(3):
            members.append(member())
            await eventually(lambda: started(members), "a member did not start")
            await asyncio.sleep(1.5)
            members[-1].say({"end": True})
            await eventually(lambda: ended(members[-1]), "a member did not end")
            await asyncio.sleep(1)
        await sending
        await eventually(lambda: processed(address, topic), "the group did not process everything")
        wrong = [(number, event) for number, member in enumerate(members) for event in member.wrong]
        found = await changelog_of(address, f"{topic}-balances")
        assert (wrong, found) == ([], bookings.expected)
    finally:
        for each in members:
            each.kill()


async def ended(member: Member) -> bool:
    return not member.alive


async def through_crashes_and_resizes(address: str, topic: str, handlers: Sequence[int], **settings: Any) -> None:
    async with Admin(address) as admin:
        await admin.create_topics(topic, partitions=2, configs={"accept.range.fetch": "true"})
        members = [Member(address, topic, parallel=parallel, **settings) for parallel in handlers]
        try:
            bookings = Bookings(address, topic)
            await bookings.send(2_000)
            await eventually(lambda: started(members), "the members did not start")
            sending = asyncio.create_task(bookings.send(6_000, per_s=1_000))
            await asyncio.sleep(0.7)
            await admin.resize(topic, 5)
            members[0].kill()
            members.append(Member(address, topic, parallel=8, **settings))
            await asyncio.sleep(1.5)
            members[1].signal(signal.SIGSTOP)  # It will wake up with changes that are not its to write any more.
            await asyncio.sleep(4.5)
            members[1].signal(signal.SIGCONT)
            await admin.resize(topic, 3)
            await sending
            await bookings.send(500)
            await eventually(lambda: processed(address, topic), "the group did not process everything")
            wrong = [(number, event) for number, member in enumerate(members) for event in member.wrong]
            found = await changelog_of(address, f"{topic}-balances")
            # Both at once: a wrong balance whose changes were refused is another mistake than one that was committed.
            assert (wrong, found) == ([], bookings.expected)
        finally:
            for member in members:
                member.kill()


async def started(members: list[Member]) -> bool:
    return all(member.told for member in members)
