"""Parallel handlers at a real broker: unequal and slow keys, rejected records, members that come, go and die, resizes.

Seen from the applications: nothing is lost, each key is handled in order and by one handler at a time, and nothing is
handled again that was committed.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from anabranch.client import Admin, ApiError, Consumer, ErrorCode, Producer, TopicPartition
from anabranch.client import sync as plain
from anabranch.client.consumer.record import Record
from tests.support.broker import BrokerProcess, running
from tests.support.examples import python_examples
from tests.support.worker_process import WorkerProcess

QUICK = {
    "group.consumer.session.timeout.ms": 3_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.initial.rebalance.delay.ms": 0,
}
KEYS = [b"slow-0", b"slow-1", *[b"hot"] * 6, *[b"key-%d" % number for number in range(40)]]
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data"), **QUICK) as process:
        yield process


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


class Told(NamedTuple):
    """What a handler told: `member` is its process."""

    at_ns: int
    event: str
    key: str
    number: int
    member: int
    partition: int
    offset: int


class Member(WorkerProcess):
    """A member in a process of its own."""

    count = 0

    def __init__(self, told: list[Told], address: str, topic: str, **plan: Any) -> None:
        self.number = Member.count = Member.count + 1
        self.told = told
        self.killed_ns: int | None = None
        whole = {
            "address": address,
            "topic": topic,
            "group": topic,
            "parallel": 16,
            "slow_s": 0.05,
            "quick_s": 0.002,
            "reject_every": 0,
            "settings": {},
            **plan,
        }
        super().__init__([sys.executable, "-m", "tests.support.handler_worker", json.dumps(whole)])

    def said(self, event: Any) -> None:
        what, at_ns, key, number, partition, offset = event
        self.told.append(Told(at_ns, what, key, number, self.number, partition, offset))

    def stop(self) -> None:
        """End it as applications should: handlers return, what is done is committed, the member leaves."""
        self.say({})
        self.wait(60)
        self.kill()


class Sender:
    """Produces records in the background; a value is the number of the record of its key."""

    def __init__(self, address: str, topic: str, count: int, per_s: int) -> None:
        self.sent: dict[str, int] = defaultdict(int)
        self._left = count
        self._thread = threading.Thread(target=self._run, args=(address, topic, count, per_s), daemon=True)
        self._thread.start()

    def _run(self, address: str, topic: str, count: int, per_s: int) -> None:
        with plain.Producer(address) as producer:
            began = time.monotonic()
            for index in range(count):
                key = KEYS[index % len(KEYS)]
                producer.send(topic, b"%d" % self.sent[key.decode()], key=key)
                self.sent[key.decode()] += 1
                self._left -= 1
                time.sleep(max(0.0, began + index / per_s - time.monotonic()))
            producer.flush()

    @property
    def left(self) -> int:
        return self._left

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


def wait_until(told: list[Told], sent: dict[str, int]) -> None:
    """Wait until all that was sent has been handled to its end."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ended = {(each.key, each.number) for each in list(told) if each.event == "end"}
        missing = sum(sent.values()) - len(ended)
        if not missing:
            return
        assert time.monotonic() < deadline, f"{missing} records were not handled"
        time.sleep(0.05)


def check(told: list[Told], killed: dict[int, int]) -> int:
    """Check the order of each key and that its handlers do not overlap; return how many records were handled twice.

    `killed`: when members were killed; what runs then never ends.
    """
    of_key: dict[str, list[Told]] = defaultdict(list)
    for each in sorted(told):
        of_key[each.key].append(each)
    twice = 0
    for key, events in of_key.items():
        handled, runs = -1, None
        for each in events:
            if each.event == "begin":
                if runs is not None:
                    assert runs.member in killed, f"two handlers had {key} at a time: {runs}, {each}"
                runs = each
                assert each.number <= handled + 1, f"{key}: {each} came before its turn, after {handled}"
            else:
                assert runs is not None and runs.number == each.number
                runs = None
                if each.event == "end":
                    twice += each.number <= handled
                    handled = max(handled, each.number)
    return twice


def test_one_member_handles_every_record_once_and_each_key_in_order(address: str) -> None:
    told: list[Told] = []
    with plain.Admin(address) as admin:
        admin.create_topics("alone", partitions=3)
    sender = Sender(address, "alone", 2_000, per_s=5_000)
    member = Member(told, address, "alone", reject_every=29)
    sender.join()
    wait_until(told, sender.sent)
    member.stop()
    assert check(told, {}) == 0
    assert any(each.event == "reject" for each in told)
    with plain.Consumer(address, group_id="alone") as reader:
        committed = reader.committed(*[("alone", number) for number in range(3)])
        assert sum(at.offset for at in committed.values() if at) == 2_000


def test_members_that_come_go_and_die_and_a_resize_lose_nothing_and_keep_the_order(address: str) -> None:
    told: list[Told] = []
    with plain.Admin(address) as admin:
        admin.create_topics("moving", partitions=2)
        sender = Sender(address, "moving", 6_000, per_s=1_000)
        members = [Member(told, address, "moving", reject_every=53) for _ in range(2)]
        after_third = _wait_for_left(sender, 4_000)
        admin.resize("moving", 5)
        _wait_for_left(sender, 2_800)
        killed = {members[0].number: members[0].kill()}
        members[0] = Member(told, address, "moving", reject_every=53)
        _wait_for_left(sender, 1_200)
        members[1].stop()
        members.pop()
        sender.join()
        wait_until(told, sender.sent)
    for member in members:
        member.stop()
    assert after_third and {each.partition for each in told} == {0, 1, 2, 3, 4}
    check(told, killed)


def _wait_for_left(sender: Sender, left: int) -> bool:
    while sender.left > left:
        time.sleep(0.02)
    return True


def test_what_a_killed_member_had_committed_is_not_handled_again(address: str) -> None:
    told: list[Told] = []
    with plain.Admin(address) as admin:
        admin.create_topics("killed", partitions=1)
    sender = Sender(address, "killed", 1_000, per_s=10_000)
    first = Member(told, address, "killed", quick_s=0.01, settings={"auto_commit_interval_ms": 50})
    sender.join()
    deadline = time.monotonic() + TIMEOUT_S
    while sum(each.event == "end" for each in told) < 500:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed = {first.number: first.kill()}
    with plain.Consumer(address, group_id="killed") as reader:
        at = reader.committed(("killed", 0))[TopicPartition("killed", 0)]
    assert at is not None and at.offset > 0
    assert at.ranges, "what was done above the first record that was not"
    second = Member(told, address, "killed")
    wait_until(told, sender.sent)
    second.stop()
    again = [each for each in told if each.member == second.number and each.event == "begin"]
    assert min(each.offset for each in again) == at.offset, "it begins with the first record that was not done"
    assert not any(first_ <= each.offset <= last for first_, last in at.ranges for each in again)
    check(told, killed)


def test_plain_functions_in_threads_and_a_poison_record_with_the_synchronous_consumer(address: str) -> None:
    with plain.Admin(address) as admin:
        admin.create_topics("threads", partitions=1)
    with plain.Producer(address) as producer:
        for number in range(200):
            producer.send("threads", b"%d" % number, key=KEYS[number % len(KEYS)])
        producer.flush()
    done: dict[bytes | None, list[int]] = defaultdict(list)
    poison: list[tuple[int, str]] = []
    lock = threading.Lock()
    with plain.Consumer(address, group_id="threads", auto_offset_reset="earliest") as consumer:
        consumer.subscribe("threads")

        def handle(record: Record) -> None:
            time.sleep(0.001)
            if record.offset == 17:
                raise ValueError("poison")
            with lock:
                done[record.key].append(record.offset)
                if sum(map(len, done.values())) == 199:
                    consumer.stop()

        consumer.run(
            handle,
            parallel=8,
            on_error="skip",
            dead_letter=lambda record, error: poison.append((record.offset, str(error))),
        )
        assert poison == [(17, "poison")]
        assert all(offsets == sorted(offsets) for offsets in done.values())
        assert sum(map(len, done.values())) == 199
        assert consumer.committed(("threads", 0))[TopicPartition("threads", 0)].offset == 200  # type: ignore[union-attr]


def test_a_handler_that_hangs_loses_its_member_the_place(address: str) -> None:
    async def story() -> None:
        async with Admin(address) as admin:
            await admin.create_topics("hanging", partitions=1)
        async with Producer(address) as producer:
            await producer.send("hanging", b"0", key=b"k")
        begun: list[str] = []

        def hang(name: str, seconds: float) -> Any:
            async def handle(record: Record) -> None:
                begun.append(name)
                await asyncio.sleep(seconds)
                begun.append(f"{name} ends")

            return handle

        async with (
            Consumer(address, group_id="hanging", auto_offset_reset="earliest", max_poll_interval_ms=1_500) as first,
            Consumer(address, group_id="hanging", auto_offset_reset="earliest") as second,
        ):
            first.subscribe("hanging")
            hanging = asyncio.create_task(first.run(hang("first", 300)))
            while not begun:
                await asyncio.sleep(0.02)
            second.subscribe("hanging")
            other = asyncio.create_task(second.run(hang("second", 0)))
            async with asyncio.timeout(TIMEOUT_S):
                while "second ends" not in begun and begun.count("first") < 2:
                    await asyncio.sleep(0.05)
            assert "first ends" not in begun
            for task in (hanging, other):
                task.cancel()
            await asyncio.gather(hanging, other, return_exceptions=True)

    asyncio.run(story())


def test_records_by_hand_come_again_when_they_are_rejected(address: str) -> None:
    async def story() -> None:
        async with Admin(address) as admin:
            await admin.create_topics("by-hand", partitions=1)
        async with Producer(address) as producer:
            for number in range(6):
                await producer.send("by-hand", b"%d" % number, key=b"ab"[number % 2 : number % 2 + 1])
            await producer.flush()
        seen: list[tuple[int, int]] = []
        settings: dict[str, Any] = {"acknowledgement_mode": "explicit", "auto_offset_reset": "earliest"}
        async with Consumer(address, group_id="by-hand", **settings) as consumer:
            consumer.subscribe("by-hand")
            async with asyncio.timeout(TIMEOUT_S):
                while len(seen) < 7:
                    for record in await consumer.poll(1):
                        seen.append((record.offset, record.delivery_count))
                        if seen[-1] == (2, 1):
                            consumer.reject(record, retry_after=0.5)
                        else:
                            consumer.done(record)
            await consumer.commit()
            at = (await consumer.committed())[TopicPartition("by-hand", 0)]
            assert at is not None and at.offset == 6
        assert [each for each in seen if each[0] % 2 == 0] == [(0, 1), (2, 1), (2, 2), (4, 1)]
        assert seen.index((2, 2)) > seen.index((5, 1)), "the other key went on"

    asyncio.run(story())


def test_an_interrupt_ends_a_member_at_once_and_what_was_done_is_committed(address: str) -> None:
    told: list[Told] = []
    with plain.Admin(address) as admin:
        admin.create_topics("interrupted", partitions=1)
    sender = Sender(address, "interrupted", 400, per_s=10_000)
    sender.join()
    member = Member(told, address, "interrupted", slow_s=0.01, settings={"auto_commit_interval_ms": 600_000})
    deadline = time.monotonic() + TIMEOUT_S
    while sum(each.event == "end" for each in told) < 100:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    member.signal(signal.SIGINT)
    member.wait(60)
    member.kill()
    with plain.Consumer(address, group_id="interrupted") as reader:
        at = reader.committed(("interrupted", 0))[TopicPartition("interrupted", 0)]
    ended = {each.offset for each in told if each.event == "end"}
    assert at is not None
    assert at.offset == min(set(range(400)) - ended, default=400)


def test_the_example_of_a_parallel_handler_keeps_balances(address: str) -> None:
    (example,) = (each for each in python_examples("docs/cooperative.md", address) if "balances" in each)
    expected = {b"account-%d" % key: sum(number % 7 for number in range(key, 120, 5)) for key in range(5)}
    with plain.Admin(address) as admin, plain.Producer(address) as producer:
        admin.create_topics("bookings", partitions=1)
        for number in range(120):
            producer.send("bookings", b"%d" % (number % 7), key=b"account-%d" % (number % 5))
        producer.flush()
    names: dict[str, Any] = {}

    def stop_in_the_end() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while names.get("balances") != expected and time.monotonic() < deadline:
            time.sleep(0.05)
        consumer = names["consumer"]
        consumer._driver._loop.call_soon_threadsafe(consumer.stop)

    watch = threading.Thread(target=stop_in_the_end)
    watch.start()
    exec(compile(example, "docs/cooperative.md", "exec"), names)
    watch.join()
    assert names["balances"] == expected


# -- what is committed ----------------------------------------------------------------------------------------------

EXPLICIT: dict[str, Any] = {
    "acknowledgement_mode": "explicit",
    "auto_offset_reset": "earliest",
    "auto_commit_interval_ms": 600_000,
}


async def begun(address: str, topic: str, *, as_member: bool = True, **settings: Any) -> Consumer:
    consumer = Consumer(address, group_id=topic, **{**EXPLICIT, **settings})
    if as_member:
        consumer.subscribe(topic)
    else:
        consumer.assign(topic)
    return consumer


async def filled(address: str, topic: str, count: int) -> None:
    async with Admin(address) as admin:
        await admin.create_topics(topic, partitions=1)
    async with Producer(address) as producer:
        for number in range(count):
            await producer.send(topic, b"%d" % number, key=b"%d" % number)
        await producer.flush()


async def polled(consumer: Consumer, count: int) -> dict[int, Record]:
    """Poll so many records."""
    found: dict[int, Record] = {}
    async with asyncio.timeout(TIMEOUT_S):
        while len(found) < count:
            found.update({record.offset: record for record in await consumer.poll(1)})
    return found


@pytest.mark.parametrize("as_member", [True, False])
def test_what_is_done_above_a_gap_is_committed_once_and_skipped_by_the_next_owner(
    address: str, as_member: bool
) -> None:
    topic = f"gaps-{as_member}"
    tp = TopicPartition(topic, 0)

    async def story() -> None:
        await filled(address, topic, 60)
        async with await begun(address, topic, as_member=as_member) as consumer:

            async def committed(*done: int) -> tuple[int, list[tuple[int, int]]]:
                for offset in done:
                    assert consumer.done(records[offset])
                await consumer.commit()
                at = (await consumer.committed(tp))[tp]
                assert at is not None
                return at.offset, list(at.ranges)

            records = await polled(consumer, 60)
            assert await committed(0, 1, 2, 5, 6, 7, 10) == (3, [(5, 7), (10, 10)])
            assert await committed(3) == (4, [(5, 7), (10, 10)]), "a plain offset would have ended the ranges"
            assert await committed(4, 30, 31) == (8, [(10, 10), (30, 31)])
            await consumer.commit(ranges={tp: [(40, 44)]})
            assert await committed() == (8, [(10, 10), (30, 31), (40, 44)])
            assert consumer.done(records[8])
        left = [offset for offset in range(9, 60) if offset not in (10, 30, 31, *range(40, 45))]
        async with await begun(address, topic, as_member=as_member) as consumer:
            assert sorted(await polled(consumer, len(left))) == left
            assert await consumer.poll(0.5) == []
        implicit = {"acknowledgement_mode": "implicit", "enable_auto_commit": False}
        async with await begun(address, topic, as_member=as_member, **implicit) as consumer:
            assert sorted(await polled(consumer, len(left))) == left, "also where work is in order"
        async with await begun(address, topic, as_member=as_member, **implicit) as consumer:
            offsets: list[int] = []
            while len(offsets) < len(left):
                offsets += (await consumer.poll_arrow(1, columns=("offset",))).column("offset").to_pylist()
            assert offsets == left, "and in tables"
            await consumer.seek(topic, 0, 0)
            assert len(await polled(consumer, 60)) == 60, "who seeks wants all"

    asyncio.run(story())


def test_without_individual_commits_the_stable_offset_is_committed(tmp_path_factory: pytest.TempPathFactory) -> None:
    tp = TopicPartition("plain", 0)

    async def story(address: str) -> None:
        await filled(address, "plain", 10)
        async with await begun(address, "plain") as consumer:
            records = await polled(consumer, 10)
            for offset in (0, 1, 5, 6):
                consumer.done(records[offset])
            await consumer.commit()
            at = (await consumer.committed(tp))[tp]
            assert at is not None and (at.offset, list(at.ranges)) == (2, [])
            with pytest.raises(ApiError) as refused:
                await consumer.commit(ranges={tp: [(8, 8)]})
            assert refused.value.code is ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED
            consumer.done(records[2])
            await consumer.commit()
            assert ((await consumer.committed(tp))[tp] or at).offset == 3
        async with await begun(address, "plain") as consumer:
            assert sorted(await polled(consumer, 7)) == list(range(3, 10))

    with running(tmp_path_factory.mktemp("plain"), **QUICK, **{"accept.individual.commit": "false"}) as process:
        asyncio.run(story(f"127.0.0.1:{process.port}"))


def test_a_partition_changes_hands_only_after_its_handlers_have_ended(address: str) -> None:
    told: list[Told] = []
    sent: dict[str, int] = defaultdict(int)
    slow: dict[str, Any] = {"slow_s": 0.6, "quick_s": 0.1, "parallel": 64}  # A round of all keys takes 0.6 seconds.
    with plain.Admin(address) as admin, plain.Producer(address) as producer:
        admin.create_topics("handed-over", partitions=2)

        def send_until(member: Member) -> None:
            """Let handlers have work all the time until a member has begun."""
            deadline = time.monotonic() + TIMEOUT_S
            while not any(each.member == member.number for each in list(told)):
                assert time.monotonic() < deadline
                for key in KEYS:
                    producer.send("handed-over", b"%d" % sent[key.decode()], key=key)
                    sent[key.decode()] += 1
                producer.flush()
                time.sleep(0.6)

        first = Member(told, address, "handed-over", **slow)
        send_until(first)
        second = Member(told, address, "handed-over", **slow)
        send_until(second)
    wait_until(told, sent)
    for member in (first, second):
        member.stop()
    assert check(told, {}) == 0, "what is done is committed before"
