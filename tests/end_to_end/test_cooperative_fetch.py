"""Cooperative fetch at a real broker, seen from the applications: members of a group share a partition without keys.

Every record is handed out, and to one member alone unless that one died, was fenced, or lost its leader before it had
committed the record; and nothing that was committed comes again.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from anabranch.client import (
    Admin,
    ApiError,
    Consumer,
    ErrorCode,
    OffsetAndMetadata,
    Producer,
    RejectError,
    SubscriptionPattern,
    TopicPartition,
)
from anabranch.client import sync as plain
from tests.support import commands
from tests.support.broker import BrokerProcess, running
from tests.support.thorough import THOROUGH
from tests.support.worker_process import WorkerProcess

QUICK = {
    "group.consumer.session.timeout.ms": 3_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.min.heartbeat.interval.ms": 100,
}
ACCEPTS = {"accept.range.fetch": "true"}
TIMEOUT_S = 120
At = tuple[int, int]
"""Partition and offset."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data"), **QUICK) as process:
        yield process


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return broker.address


class Told(NamedTuple):
    """What a member told."""

    at_ns: int
    event: str
    member: int
    offsets: tuple[At, ...]
    why: str


class Member(WorkerProcess):
    """A member in a process of its own."""

    def __init__(self, number: int, told: list[Told], address: str, topic: str, **plan: Any) -> None:
        self.number = number
        self.told = told
        whole = {
            "address": address,
            "topic": topic,
            "group": topic,
            "record_s": 0.002,
            "assigned": False,
            "settings": {},
            **plan,
        }
        super().__init__([sys.executable, "-m", "tests.support.slice_worker", json.dumps(whole)])

    def said(self, event: Any) -> None:
        what, at_ns, offsets, why = event
        self.told.append(Told(at_ns, what, self.number, tuple((part, at) for part, at in offsets), why))

    def stop(self) -> None:
        """End it as applications should: it commits, and leaves."""
        self.say({})
        self._process.wait(60)
        self.kill()


def offsets_in(told: list[Told], event: str) -> set[At]:
    return {at for each in list(told) if each.event == event for at in each.offsets}


def wait_for(what: str, found: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def check(
    told: list[Told], excused: dict[int, list[tuple[int, int]]], leader_lost: tuple[int, int] | None = None
) -> int:
    """Check who was handed what; return how many records came to several members.

    `excused`: by member, the times between which what it had in hand may go to others. `leader_lost`: between which
    times the leader was away, which alone knew who had what: who was handed a record before is as good a member as who
    was handed it after, and both may commit it.
    """
    got: dict[At, list[tuple[int, int]]] = defaultdict(list)
    committed: dict[At, tuple[int, int]] = {}
    for each in sorted(told):
        for at in each.offsets:
            if each.event == "got":
                assert at not in committed, f"{at} was committed by {committed[at]}, and came again to {each.member}"
                got[at].append((each.member, each.at_ns))
            elif each.event == "committed":
                if at in committed and committed[at][0] != each.member:
                    since = dict(got[at])
                    handed = sorted((since[committed[at][0]], since[each.member]))
                    assert leader_lost, f"{at} was committed by {committed[at]}, and by {each.member}: {got[at]}"
                    assert handed[0] <= leader_lost[1] and leader_lost[0] <= handed[1], f"{at} had both: {got[at]}"
                committed[at] = each.member, each.at_ns
    several = 0
    for at, holders in got.items():
        several += len(holders) > 1
        for (member, since_ns), (other, again_ns) in pairwise(holders):
            spans = excused.get(member, [])
            assert any(since_ns <= end and begin <= again_ns for begin, end in spans), (
                f"{at} was with {member} when {other} got it"
            )
    return several


async def _create(address: str, topic: str, partitions: int, configs: dict[str, str]) -> None:
    async with Admin(address) as admin:
        await admin.create_topics(topic, partitions=partitions, configs=configs)


def create(address: str, topic: str, partitions: int = 1, **configs: str) -> None:
    asyncio.run(
        _create(address, topic, partitions, {**ACCEPTS, **{k.replace("_", "."): v for k, v in configs.items()}})
    )


def produce(address: str, topic: str, count: int) -> None:
    with plain.Producer(address, linger_ms=0, batch_size=2_000) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, key=b"one key")


async def _committed(address: str, group: str) -> dict[TopicPartition, Any]:
    async with Admin(address) as admin:
        return dict(await admin.list_group_offsets(group))


@pytest.mark.skipif(not THOROUGH, reason="six members and a broker that starts twice take long: make conformance")
def test_six_members_one_killed_one_stopped_for_too_long_and_a_broker_that_is_killed(tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    count = 2_500
    told: list[Told] = []
    with running(tmp_path / "data", listeners=f"127.0.0.1:{port}", **QUICK) as broker:
        create(broker.address, "work")
        produce(broker.address, "work", count)
        members = [
            Member(number, told, broker.address, "work", record_s=0.01, assigned=number % 2 == 0) for number in range(6)
        ]
        try:
            wait_for(
                "every member begins", lambda: {it.member for it in list(told) if it.event == "got"} == {*range(6)}
            )
            killed, stopped = members[0], members[1]
            wait_for("the one to be killed has begun", lambda: in_hand(told, 0, time.monotonic_ns()))
            killed_ns = killed.kill()
            wait_for("the one to be stopped has begun", lambda: in_hand(told, 1, time.monotonic_ns()))
            stopped_ns = stopped.signal(signal.SIGSTOP)

            def has_come_again() -> bool:
                return any(
                    each.event == "got" and each.member > 1 and in_hand(told, 0, killed_ns) & set(each.offsets)
                    for each in list(told)
                )

            wait_for("what the killed member had comes again", has_come_again)
            before_ns = time.monotonic_ns()
            broker.kill()
            broker.start()
            again_ns = time.monotonic_ns()
            time.sleep(4)  # Longer than the session of the stopped member.
            stopped.signal(signal.SIGCONT)
            continued_ns = time.monotonic_ns()
            everything = {(0, offset) for offset in range(count)}
            wait_for("all is committed", lambda: asyncio.run(_stable(broker.address, "work")) == count)
            wait_for("the stopped member takes part again", lambda: said_since(told, 1, continued_ns))
            for member in members[1:]:
                member.stop()
        finally:
            for member in members:
                member.kill()
    assert offsets_in(told, "got") == everything, "every record was handed out"
    span = (before_ns, again_ns + 10**10)
    excused = {number: [span] for number in range(6)}
    excused[0].append((killed_ns, 1 << 62))
    excused[1].append((stopped_ns, continued_ns + 5 * 10**9))
    several = check(told, excused, (before_ns, again_ns))
    assert several < count / 4, "what was in hand comes again, and no more"
    zombie = [each for each in told if each.member == 1 and each.event in ("refused", "failed")]
    assert zombie, "the commit of the stopped member does not count"


def test_what_a_killed_member_had_comes_again(address: str) -> None:
    create(address, "lives")
    produce(address, "lives", 500)
    told: list[Told] = []
    members = [Member(number, told, address, "lives", record_s=0.01) for number in range(2)]
    try:
        wait_for("the one to be killed has begun", lambda: in_hand(told, 0, time.monotonic_ns()))
        wait_for("the other one has begun", lambda: in_hand(told, 1, time.monotonic_ns()))
        killed_ns = members[0].kill()
        wait_for("all is committed", lambda: asyncio.run(_stable(address, "lives")) == 500)
        members[1].stop()
    finally:
        for member in members:
            member.kill()
    assert offsets_in(told, "got") == {(0, offset) for offset in range(500)}, "every record was handed out"
    assert check(told, {0: [(killed_ns, 1 << 62)]}) <= 40, "what was in hand comes again, and no more"


def in_hand(told: list[Told], member: int, at_ns: int) -> set[At]:
    mine = [each for each in list(told) if each.member == member and each.at_ns <= at_ns]
    return {at for each in mine if each.event == "got" for at in each.offsets} - {
        at for each in mine if each.event == "committed" for at in each.offsets
    }


def said_since(told: list[Told], member: int, at_ns: int) -> bool:
    return any(each.member == member and each.at_ns > at_ns for each in list(told))


async def _stable(address: str, group: str) -> int:
    try:
        found = await _committed(address, group)
    except ApiError:
        return -1
    return min((at.offset for at in found.values() if at is not None), default=-1)


def test_in_quiet_times_each_record_goes_to_one_member_and_a_member_that_leaves_gives_back_at_once(
    address: str,
) -> None:
    create(address, "quiet", partitions=2)
    produce(address, "quiet", 2_000)
    told: list[Told] = []
    members = [Member(number, told, address, "quiet") for number in range(2)]
    try:
        wait_for("some is committed", lambda: len(offsets_in(told, "committed")) > 200)
        wait_for("both begin", lambda: len({each.member for each in list(told) if each.event == "got"}) == 2)
        members[0].stop()
        wait_for("all is committed", lambda: len(offsets_in(told, "committed")) == 2_000)
        for member in members[1:]:
            member.stop()
    finally:
        for member in members:
            member.kill()
    assert check(told, {0: [(0, 1 << 62)]}) <= 200, "only what the first one had, and had not begun"
    assert not [each for each in told if each.event in ("refused", "failed")]
    found = asyncio.run(_committed(address, "quiet"))
    assert sum(at.offset for at in found.values()) == 2_000 and not any(at.ranges for at in found.values())


def test_a_parallel_handler_takes_records_of_a_key_at_the_same_time_and_rejected_ones_come_again(address: str) -> None:
    create(address, "handled")
    produce(address, "handled", 300)
    at_once, most, deliveries = 0, 0, defaultdict(int)

    async def consume() -> None:
        async with Consumer(address, group_id="handlers", share="any", auto_offset_reset="earliest") as consumer:
            consumer.subscribe("handled")

            async def handle(record: Any) -> None:
                nonlocal at_once, most
                at_once += 1
                most = max(most, at_once)
                await asyncio.sleep(0.005)
                at_once -= 1
                deliveries[record.offset] += 1
                if record.offset % 50 == 0 and record.delivery_count == 1:
                    raise RejectError(retry_after=0.05)
                if len(deliveries) == 300 and sum(deliveries.values()) == 306:
                    consumer.stop()

            await asyncio.wait_for(consumer.run(handle, parallel=16), TIMEOUT_S)

    asyncio.run(consume())
    assert most == 16, "records of one key run beside each other"
    assert {offset for offset, count in deliveries.items() if count == 2} == {0, 50, 100, 150, 200, 250}
    assert asyncio.run(_stable(address, "handlers")) == 300


def test_records_by_hand_are_committed_one_by_one_and_ranges_as_they_are_given(address: str) -> None:
    create(address, "hands")
    produce(address, "hands", 20)

    async def consume() -> None:
        settings = {"auto_offset_reset": "earliest", "acknowledgement_mode": "explicit", "enable_auto_commit": False}
        async with Consumer(address, group_id="hands", share="any", **settings) as consumer:
            consumer.assign(["hands"], share="any")
            records: list[Any] = []
            while len(records) < 20:
                records += await consumer.poll(5)
            for record in records[5:10]:
                assert consumer.done(record)
            await consumer.commit()
            found = (await consumer.committed(("hands", 0)))[TopicPartition("hands", 0)]
            assert found is not None and (found.offset, list(found.ranges)) == (0, [(5, 9)])
            await consumer.commit(ranges={("hands", 0): [(0, 2)]})
            found = (await consumer.committed(("hands", 0)))[TopicPartition("hands", 0)]
            assert found is not None and (found.offset, list(found.ranges)) == (3, [(5, 9)])
            with pytest.raises(ApiError, match="not all in hand"):
                await consumer.commit(ranges={("hands", 0): [(18, 25)]})
            assert consumer.reject(records[3])
            (again,) = await consumer.poll(5)
            assert (again.offset, again.delivery_count) == (3, 2)

    asyncio.run(consume())


def test_a_transaction_that_is_open_is_not_handed_out_and_an_aborted_one_is_done_by_itself(address: str) -> None:
    create(address, "decided")

    async def consume() -> None:
        settings = {"auto_offset_reset": "earliest", "isolation_level": "read_committed"}
        async with (
            Producer(address, transactional_id="decided", linger_ms=0) as producer,
            Consumer(address, group_id="decided", share="any", auto_commit_interval_ms=100, **settings) as consumer,
        ):
            consumer.subscribe("decided")
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send("decided", b"aborted")
            await producer.abort_transaction()
            await producer.begin_transaction()
            for number in range(3):
                await producer.send("decided", b"%d" % number)
            await producer.flush()
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                assert await consumer.poll(0.2) == [], "nothing beyond the last stable offset is claimed"
            await producer.commit_transaction()
            values: list[bytes | None] = []
            deadline = time.monotonic() + 30
            while len(values) < 3:
                values += [record.value for record in await consumer.poll(5)]
                assert time.monotonic() < deadline, values
            assert values == [b"0", b"1", b"2"]
            deadline = time.monotonic() + TIMEOUT_S
            while (await consumer.lag())[TopicPartition("decided", 0)]:
                await consumer.poll(0.1)
                assert time.monotonic() < deadline, "markers and aborted records are committed as what is around them"

    asyncio.run(consume())


def test_ranges_of_slices_are_committed_in_transactions_and_let_go_of_after_them(address: str) -> None:
    create(address, "eos")
    produce(address, "eos", 20)

    async def consume() -> None:
        settings = {"auto_offset_reset": "earliest", "enable_auto_commit": False, "max_poll_records": 10}
        async with (
            Producer(address, transactional_id="eos", linger_ms=0) as producer,
            Consumer(address, group_id="eos", share="any", **settings) as consumer,
        ):
            consumer.subscribe("eos")
            await producer.init_transactions()
            seen: list[int] = []
            while len(seen) < 20:
                records = await consumer.poll(5)
                seen += [record.offset for record in records]
                with pytest.raises(ApiError, match="send the ranges"):
                    consumer.offsets_to_commit()
                if records:
                    done = {("eos", 0): [(records[0].offset, records[-1].offset)]}
                    offsets = {tp: OffsetAndMetadata(-1, ranges=ranges) for tp, ranges in done.items()}
                    await producer.begin_transaction()
                    await producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
                    await producer.commit_transaction()
                    await consumer.commit(ranges=done)
            assert seen == list(range(20))
            assert consumer._cooperative is not None and len(consumer._cooperative.ledger) == 0
        assert await _stable(address, "eos") == 20

    asyncio.run(consume())


def test_of_a_topic_of_transactions_all_is_committed_by_two_members_in_transactions(address: str) -> None:
    create(address, "input")
    create(address, "output")
    numbers = [number for number in range(24) if number // 3 != 4]
    settings = {"enable_auto_commit": False, "isolation_level": "read_committed", "max_poll_records": 4}
    seen: list[bytes] = []

    async def fill() -> None:
        async with Producer(address, transactional_id="fill", linger_ms=0) as producer:
            await producer.init_transactions()
            for begin in range(0, 24, 3):
                await producer.begin_transaction()
                for number in range(begin, begin + 3):
                    await producer.send("input", b"%d" % number)
                await producer.flush()  # An abort drops what is not sent.
                await (producer.commit_transaction() if begin != 12 else producer.abort_transaction())

    async def is_committed(producer: Producer, consumer: Consumer, records: list[Any], done: Any) -> bool:
        offsets = {tp: OffsetAndMetadata(-1, ranges=ranges) for tp, ranges in done.items()}
        await producer.begin_transaction()
        for record in records:
            await producer.send("output", record.value)
        try:
            await producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
        except ApiError as error:
            if error.code is not ErrorCode.STALE_MEMBER_EPOCH:  # The other member has just joined.
                raise
            await producer.abort_transaction()
            return False
        await producer.commit_transaction()
        return True

    async def work(name: str) -> None:
        async with (
            Producer(address, transactional_id=name, linger_ms=0) as producer,
            Consumer(address, group_id="input", share="any", auto_offset_reset="earliest", **settings) as consumer,
        ):
            consumer.subscribe("input")
            await producer.init_transactions()
            while await _stable(address, "input") < 32:
                if records := await consumer.poll(0.1):
                    done = consumer.ranges_of(records)
                    while not await is_committed(producer, consumer, records, done):
                        await asyncio.sleep(0.1)
                    await consumer.commit(ranges=done)
            while consumer._cooperative and len(consumer._cooperative.ledger):
                await consumer.poll(0.05)

    async def output() -> None:
        async with Consumer(address, auto_offset_reset="earliest", isolation_level="read_committed") as consumer:
            consumer.assign("output")
            while len(seen) < len(numbers):
                seen.extend(record.value or b"" for record in await consumer.poll(1))
            seen.extend(record.value or b"" for record in await consumer.poll(0.2))

    async def all_of_it() -> None:
        await fill()
        await asyncio.wait_for(asyncio.gather(work("first"), work("second")), 25)
        await asyncio.wait_for(output(), TIMEOUT_S)

    asyncio.run(all_of_it())
    assert sorted(map(int, seen)) == numbers


def test_what_was_deleted_is_passed_and_partitions_that_are_added_are_read(address: str) -> None:
    create(address, "moving")
    produce(address, "moving", 100)

    async def consume() -> None:
        async with (
            Admin(address) as admin,
            Consumer(
                address, group_id="moving", share="any", auto_offset_reset="earliest", max_poll_records=10
            ) as consumer,
        ):
            consumer.subscribe("moving")
            seen = {record.offset for record in await consumer.poll(20, max_records=10)}
            assert seen == set(range(10))
            await consumer.commit()
            await admin.delete_records({TopicPartition("moving", 0): 90})
            await admin.resize("moving", 3)
            await asyncio.to_thread(produce, address, "moving", 60)
            got: list[Any] = []
            deadline = time.monotonic() + TIMEOUT_S
            while len({(it.partition, it.offset) for it in got if it.partition or it.offset >= 100}) < 60:
                got += await consumer.poll(0.5)
                assert time.monotonic() < deadline, len(got)
            await consumer.commit()
            while any((await consumer.lag()).values()):
                await consumer.poll(0.1)
                await consumer.commit()
                assert time.monotonic() < deadline

    asyncio.run(consume())


def refusal(address: str, topic: str, **settings: Any) -> ApiError:
    async def ask() -> None:
        async with Consumer(address, share="any", **{"group_id": topic, **settings}) as consumer:
            consumer.subscribe(topic)
            for _ in range(100):
                await consumer.poll(0.2)

    with pytest.raises(ApiError) as refused:
        asyncio.run(asyncio.wait_for(ask(), TIMEOUT_S))
    return refused.value


def test_a_topic_that_does_not_allow_it_says_so(address: str) -> None:
    create(address, "closed", accept_range_fetch="false")
    error = refusal(address, "closed")
    assert error.code is ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED and "accept.range.fetch is false" in str(error)


def test_a_group_that_begins_nowhere_says_so(address: str) -> None:
    create(address, "nowhere")
    error = refusal(address, "nowhere", auto_offset_reset="none")
    assert error.code is ErrorCode.OFFSET_OUT_OF_RANGE and "auto.offset.reset is none" in str(error)


def test_calls_that_need_positions_are_refused(address: str) -> None:
    async def ask() -> None:
        async with Consumer(address, group_id="calls", share="any") as consumer:
            consumer.subscribe("calls")
            for call in (consumer.seek("calls", 0, 1), consumer.position("calls", 0), consumer.poll_arrow(0)):
                with pytest.raises(ApiError, match="without keys"):
                    await call
            with pytest.raises(ApiError, match="no offsets"):
                await consumer.commit({("calls", 0): 5})

    asyncio.run(ask())


def test_two_commands_share_a_partition_without_keys(broker: BrokerProcess) -> None:
    create(broker.address, "printed")
    produce(broker.address, "printed", 400)
    words = ("consume", "printed", "--group", "printers", "--share", "any", "--format", "value", "--until-end")
    first, _ = commands.run(broker.address, *words, "--limit", "150")
    second, _ = commands.run(broker.address, *words)
    printed = [*map(int, first.split()), *map(int, second.split())]
    assert len(first.split()) == 150
    assert sorted(printed) == list(range(400)), "what the first one had and did not print is not committed"


def test_a_commit_of_records_that_a_fenced_member_had_says_that_it_does_not_count(address: str) -> None:
    create(address, "fenced")
    produce(address, "fenced", 20)

    async def consume() -> None:
        async with Consumer(address, group_id="fenced", share="any", auto_offset_reset="earliest") as consumer:
            consumer.subscribe("fenced")
            while not await consumer.poll(5):
                pass
            assert consumer._cooperative is not None
            consumer._cooperative.ledger.fenced()  # As a heartbeat does that comes too late.
            with pytest.raises(ApiError, match="20 records of the last poll were not committed"):
                await consumer.commit()

    asyncio.run(consume())


def test_a_record_that_takes_longer_than_the_hold_time_is_handed_out_once_and_committed(tmp_path: Path) -> None:
    async def consume(address: str) -> None:
        settings = {"auto_offset_reset": "earliest", "acknowledgement_mode": "explicit", "enable_auto_commit": False}
        async with Consumer(address, group_id="long", share="any", **settings) as consumer:
            consumer.subscribe("long")
            records: list[Any] = []
            while len(records) < 3:
                records += await consumer.poll(5)
            assert consumer._cooperative is not None
            session = consumer._cooperative.ledger.session(TopicPartition("long", 0))
            claims, deadline = session.sequence, time.monotonic() + TIMEOUT_S
            while session.sequence == claims:  # Until the slice is offered again.
                assert await consumer.poll(0.1) == [], "it is worked on"
                assert time.monotonic() < deadline
            for record in records:
                assert consumer.done(record)
            await consumer.commit()
        assert await _stable(address, "long") == 3

    with running(tmp_path / "data", **{**QUICK, "cooperative.fetch.hold.ms": 500}) as broker:
        create(broker.address, "long")
        produce(broker.address, "long", 3)
        asyncio.run(consume(broker.address))


BY_HAND = {"auto_offset_reset": "earliest", "enable_auto_commit": False}


async def polled(consumer: Consumer, count: int) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count:
        found += [record.offset for record in await consumer.poll(1)]
        assert time.monotonic() < deadline, f"{len(found)} of {count} records"
    return found


def test_a_member_gets_more_records_than_it_commits_though_each_is_a_slice(address: str) -> None:
    create(address, "singly")
    produce(address, "singly", 250)

    async def consume() -> None:
        async with Consumer(address, group_id="singly", share="any", max_poll_records=1, **BY_HAND) as consumer:
            consumer.subscribe("singly")
            assert await polled(consumer, 250) == list(range(250))
            await consumer.commit()
        assert await _stable(address, "singly") == 250

    asyncio.run(consume())


def test_partitions_behind_others_that_are_never_empty_have_their_turn(address: str) -> None:
    """An answer is full before it has something of the last ones: they were read by nobody."""
    create(address, "turns", partitions=6)

    async def send(producer: Producer, count: int, *numbers: int) -> None:
        for number in numbers:
            for _ in range(count):
                await producer.send("turns", b"x" * 1_000, partition=number)

    async def consume() -> None:
        seen: set[int] = set()
        settings: dict[str, Any] = {"max_poll_records": 100, "fetch_max_bytes": 150_000}
        async with Producer(address) as producer:
            await send(producer, 1_000, *range(6))
            member = Consumer(address, group_id="turns", share="any", auto_offset_reset="earliest", **settings)
            async with member as consumer:
                consumer.subscribe("turns")
                deadline = time.monotonic() + 40
                while len(seen) < 6:
                    assert time.monotonic() < deadline, seen
                    await send(producer, 100, 0, 1)
                    seen |= {record.partition for record in await consumer.poll(0.1)}

    asyncio.run(consume())


def test_deleted_records_are_passed_and_committed_without_the_application(address: str) -> None:
    create(address, "deleted")
    produce(address, "deleted", 4_000)

    def member() -> Consumer:
        consumer = Consumer(address, group_id="deleted", share="any", max_poll_records=10, **BY_HAND)
        consumer.subscribe("deleted")
        return consumer

    async def consume() -> None:
        async with member() as consumer:
            assert await polled(consumer, 10) == list(range(10))
            await consumer.commit()
        async with Admin(address) as admin:
            await admin.delete_records({TopicPartition("deleted", 0): 3_990})
        async with member() as consumer:
            assert await polled(consumer, 10) == list(range(3_990, 4_000))
            deadline = time.monotonic() + TIMEOUT_S
            while await _stable(address, "deleted") < 3_990:
                await consumer.poll(0.05)
                assert time.monotonic() < deadline

    asyncio.run(consume())


def test_a_member_that_stalls_drops_what_it_had_though_no_partition_is_assigned_to_it(address: str) -> None:
    create(address, "stalls")

    def member() -> Consumer:
        settings = {**BY_HAND, "max_poll_interval_ms": 1_500, "fetch_max_wait_ms": 50}
        consumer = Consumer(address, group_id="stalls", share="any", **settings)
        consumer.subscribe("stalls")
        return consumer

    def owns(consumer: Consumer) -> bool:
        assert consumer._cooperative is not None
        return bool(consumer._cooperative._member.owned)

    async def consume() -> None:
        async with member() as one, member() as other:
            deadline = time.monotonic() + TIMEOUT_S
            while not owns(one) and not owns(other):
                await asyncio.gather(one.poll(0.1), other.poll(0.1))
                assert time.monotonic() < deadline
            idle, owner = (other, one) if owns(one) else (one, other)
            await asyncio.sleep(0.2)  # No claim waits.
            await asyncio.to_thread(produce, address, "stalls", 20)
            records: list[Any] = []
            while not records:
                records = await idle.poll(1, max_records=5)
            assert [record.offset for record in records] == [0, 1, 2, 3, 4]
            assert await polled(owner, 20) == list(range(20)), "as the other one has left by then"
            await owner.commit()
            for _ in range(5):
                assert await idle.poll(0.2) == [], "what was handed to others is not handed out"

    asyncio.run(consume())


@pytest.mark.parametrize("wanted", ["named", SubscriptionPattern("match.*")], ids=["by-name", "by-pattern"])
def test_a_topic_that_is_created_later_is_read_from_its_start_by_members_that_begin_at_the_end(
    address: str, wanted: Any
) -> None:
    topic = wanted if isinstance(wanted, str) else "matched"

    async def consume() -> None:
        settings = {"auto_offset_reset": "latest", "metadata_max_age_ms": 200}
        async with Consumer(address, group_id=topic, share="any", **settings) as consumer:
            consumer.subscribe(wanted)
            deadline = time.monotonic() + TIMEOUT_S
            assert consumer._cooperative is not None
            while consumer._cooperative.fetches._known_for is None:
                await consumer.poll(0.05)
                assert time.monotonic() < deadline
            await asyncio.to_thread(create, address, topic)
            await asyncio.to_thread(produce, address, topic, 10)
            assert await polled(consumer, 10) == list(range(10))

    asyncio.run(consume())


def test_a_partition_that_was_added_is_read_though_its_first_records_were_deleted_before_a_member_came(
    address: str,
) -> None:
    create(address, "added")
    produce(address, "added", 10)
    added = TopicPartition("added", 1)

    async def consume() -> None:
        settings = {"auto_offset_reset": "earliest", "max_poll_records": 10}
        async with Admin(address) as admin, Consumer(address, group_id="added", share="any", **settings) as consumer:
            consumer.assign([("added", 0)], share="any")
            await polled(consumer, 10)
            await consumer.commit()
            await admin.resize("added", 2)
            deadline = time.monotonic() + TIMEOUT_S
            while added not in await _committed(address, "added"):  # The coordinator writes where it begins.
                await consumer.poll(0.1)
                assert time.monotonic() < deadline
            async with Producer(address) as producer:
                for number in range(60):
                    await producer.send("added", b"%d" % number, partition=1)
            await admin.delete_records({added: 50})
            consumer.assign([("added", 0), ("added", 1)], share="any")
            assert await polled(consumer, 10) == list(range(50, 60))
            await consumer.commit()
            assert (await _committed(address, "added"))[added].offset == 60

    asyncio.run(consume())
