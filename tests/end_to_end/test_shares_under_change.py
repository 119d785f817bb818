"""Members that share partitions, while the topic or a member changes under them: real brokers, from their edge.

Records of a key are numbered. Whatever is deleted, aborted, or made again, what is there is read, each key in order.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import confluent_kafka
import pytest

from anabranch.client import Admin, Consumer, Producer, TopicPartition
from anabranch.machines.key_ranges import WHOLE, ranges_of, size
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts
from tests.end_to_end.test_shares_in_groups import QUICK, Sender, create, read_some
from tests.support.broker import BrokerProcess, running

SETTINGS = {**QUICK, "log.cleaner.backoff.ms": 50, "key.range.balance.interval.ms": 500}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data"), **SETTINGS) as process:
        yield process


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


class Members:
    """Members of one group in this process: what each was handed, by key, in order."""

    def __init__(self, address: str, topic: str, **settings: Any) -> None:
        self.address, self.topic = address, topic
        self.settings: dict[str, Any] = {
            "group_id": topic,
            "allow_key_share": True,
            "auto_offset_reset": "earliest",
            "auto_commit_interval_ms": 200,
            "metadata_max_age_ms": 1_000,
            **settings,
        }
        self.consumers: dict[str, Consumer] = {}
        self.seen: dict[bytes, list[int]] = defaultdict(list)
        self.of: dict[str, int] = defaultdict(int)

    async def __aenter__(self) -> Members:
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in [*self.consumers]:
            await self.leave(name)

    def join(self, *names: str, **settings: Any) -> None:
        for name in names:
            self.consumers[name] = Consumer(self.address, **{**self.settings, **settings})
            self.consumers[name].subscribe(self.topic)

    async def leave(self, name: str) -> None:
        await self.consumers.pop(name).close()

    @property
    def total(self) -> int:
        return sum(len(set(numbers)) for numbers in self.seen.values())

    def shares(self, partition: int = 0) -> dict[str, int]:
        """By member, how many places of a partition's key space it has."""
        found: dict[str, int] = {}
        for name, consumer in self.consumers.items():
            if (self.topic, partition) in consumer.assignment():
                ranges = consumer.key_ranges().get(TopicPartition(self.topic, partition), ())
                found[name] = size(ranges_of(ranges) or WHOLE)
        return found

    def is_shared(self, *names: str, partition: int = 0) -> bool:
        """Whether exactly these members have a part of a partition, and all of it among them."""
        shares = self.shares(partition)
        return shares.keys() == {*names} and sum(shares.values()) == size(WHOLE)

    async def poll(self) -> None:
        for name, consumer in [*self.consumers.items()]:
            for record in await consumer.poll(0.03):
                assert record.key is not None and record.value is not None
                self.seen[record.key].append(int(record.value))
                self.of[name] += 1

    async def until(self, holds: Callable[[], bool], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, (self.total, dict(self.of), self.shares())
            await self.poll()

    def check(self, sent: dict[bytes, int], since: dict[bytes, int] | None = None) -> None:
        """Each key's records, from a number on, were handed out in order, none twice."""
        expected = {key: [*range((since or {}).get(key, 0), count)] for key, count in sent.items()}
        assert self.seen == {key: numbers for key, numbers in expected.items() if numbers}


# -- members that stand still -----------------------------------------------------------------------------------------


def test_nobody_waits_for_ever_for_sharers_that_never_commit(address: str) -> None:
    """A new partition waits for its keys in the one before, as long as the sharers of that have time to commit."""
    asyncio.run(_never_commit(address, "still"))


async def _never_commit(address: str, topic: str) -> None:
    await create(address, topic, 1, **{"enable.ordered.delivery": "true"})
    sender = Sender(address, topic)
    still: dict[str, Any] = {"enable_auto_commit": False, "max_poll_interval_ms": 3_000, "session_timeout_ms": 3_000}
    async with (
        Producer(address) as producer,
        Admin(address) as admin,
        Members(address, topic, **still) as members,
    ):
        members.join("a", "b")
        await sender.send(300, producer)
        await members.until(lambda: members.is_shared("a", "b") and members.total == 300)
        await admin.resize(topic, 2)
        members.join("c")
        await sender.send(300, producer)
        began = time.monotonic()
        await members.until(lambda: members.total == 600)
        assert time.monotonic() - began > 1.5, "the new partition did not wait at all"


# -- load, and configs -------------------------------------------------------------------------------------------------


def test_a_partition_with_a_heavy_half_is_cut_so_that_loads_are_near_equal(address: str) -> None:
    """Members that were there first are given other cuts, too, and no key is disturbed by that."""
    asyncio.run(_heavy_half(address, "heavy"))


async def _heavy_half(address: str, topic: str) -> None:
    await create(address, topic, 1)
    half = Interval(0, SPACE_END // 2)
    keys = [b"k%d" % number for number in range(1_500)]
    low = [key for key in keys if _place(key) <= half.end]
    high = [key for key in keys if _place(key) > half.end]
    sent: dict[bytes, int] = defaultdict(int)
    async with Producer(address, linger_ms=5) as producer, Members(address, topic) as members:

        async def send() -> None:
            for number in range(270):
                key = high[number % len(high)] if number % 9 == 0 else random.choice(low)
                await producer.send(topic, b"%d" % sent[key], key=key)
                sent[key] += 1

        members.join("a", "b")
        await members.until(lambda: members.is_shared("a", "b"))
        assert [*members.shares().values()] == [size(WHOLE) // 2] * 2, "nothing is known of the load"
        deadline = time.monotonic() + 60
        while not (members.is_shared("a", "b") and min(members.shares().values()) < 0.35 * size(WHOLE)):
            assert time.monotonic() < deadline, members.shares()
            await send()
            await members.poll()
            await asyncio.sleep(0.1)
        members.of.clear()
        count = sum(sent.values())
        await members.until(lambda: members.total == count)
        members.of.clear()
        for _ in range(6):
            await send()
        await members.until(lambda: members.total == sum(sent.values()))
        assert max(members.of.values()) < 1.3 * min(members.of.values()), members.of
        members.check(sent)


def test_a_lowered_number_of_sharers_takes_effect_without_a_join(address: str) -> None:
    asyncio.run(_fewer_sharers(address, "fewer"))


async def _fewer_sharers(address: str, topic: str) -> None:
    await create(address, topic, 1)
    async with Admin(address) as admin, Members(address, topic) as members:
        members.join("a", "b", "c")
        await members.until(lambda: members.is_shared("a", "b", "c"))
        await admin.alter_configs("group", topic, {"max.shares.per.partition": "2"})
        await members.until(lambda: len(members.shares()) == 2 and sum(members.shares().values()) == size(WHOLE))


# -- records that are deleted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", ["latest", "earliest"])
def test_keys_that_are_further_are_not_reset_with_those_whose_records_were_deleted(address: str, reset: str) -> None:
    asyncio.run(_deleted_above_a_frontier(address, f"deleted-{reset}", reset))


async def _deleted_above_a_frontier(address: str, topic: str, reset: str) -> None:
    await create(address, topic, 1)
    sender = Sender(address, topic)
    low, high = cuts(SPACE, 2)
    settings: dict[str, Any] = {"group_id": topic, "enable_auto_commit": False}
    read: dict[bytes, list[int]] = defaultdict(list)

    def note(records: Iterable[Any]) -> None:
        for record in records:
            read[record.key].append(int(record.value))

    async with Producer(address) as producer, Admin(address) as admin:
        await sender.send(300, producer)
        await producer.flush()
        for share, count in ((low, 10), (high, 60)):
            async with Consumer(address, auto_offset_reset="earliest", **settings) as one:
                one.assign({(topic, 0): [share]})
                note(await read_some(one, count))
                await one.commit()
        async with Consumer(address, auto_offset_reset=reset, **settings) as whole:
            committed = (await whole.committed((topic, 0)))[TopicPartition(topic, 0)]
            assert committed is not None
            (_, _, behind), (_, _, ahead) = committed.shares
            assert behind < ahead
            await admin.delete_records({(topic, 0): behind + 5})
            before, of_high = dict(sender.sent), {key for key in sender.sent if high.start <= _place(key) <= high.end}
            whole.assign([(topic, 0)])
            note(await whole.poll(1.0))
            deadline = time.monotonic() + 20
            while await whole.position(topic, 0) < 300:
                assert time.monotonic() < deadline
                note(await whole.poll(0.2))
            await sender.send(100, producer)
            await producer.flush()
            while await whole.position(topic, 0) < 400:
                assert time.monotonic() < deadline
                note(await whole.poll(0.2))
            await whole.commit()
            committed = (await whole.committed((topic, 0)))[TopicPartition(topic, 0)]
            assert committed is not None and committed.offset == 400 and not committed.shares
    for key, numbers in sender.sent.items():
        if key in of_high:
            assert read[key] == [*range(numbers)], "a key that was further has lost records"
        else:
            assert read[key] == sorted(set(read[key]))
            assert {*range(before.get(key, 0), numbers)} <= {*read[key]}


def _place(key: bytes) -> int:
    from anabranch.machines.keyspace import spread
    from anabranch.records.hashing import murmur2

    return spread(murmur2(key), 1)


def test_a_latest_group_that_shares_passes_over_nothing_once_it_has_begun(address: str) -> None:
    """Members join and leave, records are deleted below, and partitions appear."""
    asyncio.run(_latest(address, "latest"))


async def _latest(address: str, topic: str) -> None:
    await create(address, topic, 1, **{"enable.ordered.delivery": "true"})
    sender = Sender(address, topic)
    async with (
        Producer(address) as producer,
        Admin(address) as admin,
        Members(address, topic, auto_offset_reset="latest") as members,
    ):
        await sender.send(200, producer)
        await producer.flush()
        before = dict(sender.sent)
        members.join("a")
        await members.until(lambda: members.is_shared("a"))
        await members.consumers["a"].position(topic, 0)
        await members.consumers["a"].commit()
        for names, leaves, deletes, count in (("b", "", 250, 1), ("cd", "", 0, 2), ("", "a", 0, 0)):
            members.join(*names)
            await sender.send(200, producer)
            if leaves:
                await members.leave(leaves)
            await members.until(lambda: members.total == sender.total - 200)
            if deletes:
                await admin.delete_records({(topic, 0): deletes})
            if count > 1:
                await admin.resize(topic, count)
        await members.until(lambda: not members.shares().keys() & {"a"} and len(members.shares(1)) > 0)
        await sender.send(200, producer)
        await members.until(lambda: members.total == sender.total - 200)
        members.check(sender.sent, before)


def test_a_topic_that_is_made_again_while_it_is_shared_is_read_from_its_begin(address: str) -> None:
    asyncio.run(_made_again(address, "again"))


async def _made_again(address: str, topic: str) -> None:
    await create(address, topic, 1)
    async with Admin(address) as admin, Members(address, topic) as members:
        members.join("a", "b")
        await _read_all(members, 300)
        await admin.delete_topics(topic)
        await create(address, topic, 1)
        members.seen.clear()
        await _read_all(members, 200)


async def _read_all(members: Members, count: int) -> None:
    sender = Sender(members.address, members.topic)
    async with Producer(members.address) as producer:
        await sender.send(count, producer)
    await members.until(lambda: members.is_shared("a", "b") and members.total == count)
    members.check(sender.sent)


def test_aborted_records_are_handed_to_no_sharer_that_reads_committed_ones(address: str) -> None:
    asyncio.run(_aborted(address, "aborted"))


async def _aborted(address: str, topic: str) -> None:
    await create(address, topic, 1)
    sender = Sender(address, topic)
    async with (
        Producer(address, transactional_id=topic) as producer,
        Members(address, topic, isolation_level="read_committed") as members,
    ):
        await producer.init_transactions()
        members.join("a", "b", "c")
        for round in range(12):
            sent = dict(sender.sent)
            await producer.begin_transaction()
            await sender.send(40, producer)
            if round % 3 == 1:
                await producer.abort_transaction()
                sender.sent = defaultdict(int, sent)
            else:
                await producer.commit_transaction()
            await members.poll()
        await members.until(lambda: members.total == sender.total and members.is_shared("a", "b", "c"))
        await members.poll()
        members.check(sender.sent)
        assert len(members.of) > 1


def test_sharers_of_a_compacted_topic_are_handed_the_last_record_of_each_key(
    broker: BrokerProcess, address: str
) -> None:
    asyncio.run(_compacted(broker, address, "compacted"))


async def _compacted(broker: BrokerProcess, address: str, topic: str) -> None:
    compacts = {"cleanup.policy": "compact", "segment.bytes": "4096", "min.cleanable.dirty.ratio": "0.01"}
    await create(address, topic, 1, **compacts)
    sender = Sender(address, topic)
    async with Producer(address, linger_ms=0) as producer, Members(address, topic) as members:
        members.join("a", "b")
        for _ in range(5):
            await sender.send(300, producer)
            await producer.flush()
            await members.poll()
        await members.until(
            lambda: (
                {key: numbers[-1] for key, numbers in members.seen.items()}
                == {key: count - 1 for key, count in sender.sent.items()}
            )
        )
        assert members.is_shared("a", "b")
        for numbers in members.seen.values():
            assert numbers == sorted(set(numbers))
    deadline = time.monotonic() + 20
    while not broker.metrics().get("anabranch_compaction_runs_total", 0.0):
        assert time.monotonic() < deadline, "nothing was compacted"
        await asyncio.sleep(0.1)
    async with Members(address, topic, group_id=f"{topic}-late") as late:  # Most records are gone.
        late.join("a", "b", "c")
        await late.until(
            lambda: (
                {key: numbers[-1] for key, numbers in late.seen.items() if numbers}
                == {key: count - 1 for key, count in sender.sent.items()}
            )
        )
        for numbers in late.seen.values():
            assert numbers == sorted(set(numbers))
        assert late.total < sender.total


def test_a_static_member_keeps_its_keys_while_it_restarts_and_gives_them_up_when_it_turns_unwilling(
    address: str,
) -> None:
    asyncio.run(_static(address, "static"))


async def _static(address: str, topic: str) -> None:
    await create(address, topic, 2)
    sender = Sender(address, topic)
    async with Producer(address) as producer, Members(address, topic) as members:
        members.join("a", group_instance_id="a")
        members.join("b", "c", "d")

        def is_settled() -> bool:
            return all(sum(members.shares(number).values()) == size(WHOLE) for number in (0, 1))

        def keys(name: str) -> Any:
            return members.consumers[name].key_ranges()

        await sender.send(300, producer)
        await members.until(
            lambda: is_settled() and members.total == 300 and all(keys(name) for name in members.consumers)
        )
        before = {name: keys(name) for name in members.consumers}
        gone = members.consumers.pop("a")
        await gone.close(leave=False)
        await sender.send(300, producer)
        await members.poll()
        members.join("a", group_instance_id="a")
        await members.until(lambda: is_settled() and members.total == 600)
        assert {name: keys(name) for name in members.consumers} == before
        gone = members.consumers.pop("a")
        await gone.close(leave=False)
        members.join("a", group_instance_id="a", allow_key_share=False)
        await sender.send(300, producer)
        await members.until(lambda: is_settled() and members.total == 900 and not keys("a"))
        members.check(sender.sent)


def test_stock_members_of_a_group_that_shares_take_whole_partitions(address: str) -> None:
    """They come and go, while ours share what is left; between both every key stays in order."""
    asyncio.run(_stock(address, "stock"))


async def _stock(address: str, topic: str) -> None:
    await create(address, topic, 4)
    sender = Sender(address, topic)
    numbers: dict[bytes, list[int]] = defaultdict(list)
    async with Producer(address) as producer, Members(address, topic) as members:
        members.seen = numbers
        members.join("a", "b", "c", "d", "e")
        await sender.send(300, producer)
        await members.until(lambda: members.total == 300 and all(len(members.shares(each)) > 0 for each in range(4)))
        with closing(stock_consumer(address, topic)) as one, closing(stock_consumer(address, topic)) as other:
            taken = 0

            async def until(holds: Callable[[], bool]) -> None:
                nonlocal taken
                deadline = time.monotonic() + 40
                while not holds():
                    assert time.monotonic() < deadline, (members.total, taken)
                    await members.poll()
                    for message in (*one.consume(100, 0.02), *other.consume(100, 0.02)):
                        assert message.error() is None, message.error()
                        numbers[message.key()].append(int(message.value()))
                        taken += 1

            one.subscribe([topic])
            other.subscribe([topic])
            await until(lambda: bool(one.assignment() or other.assignment()))
            await sender.send(600, producer)
            await until(lambda: members.total == 900 and taken > 0)
            whole = [*one.assignment(), *other.assignment()]
            assert len(whole) == 1  # Due are 8/7 partitions.
            assert not members.shares(whole[0].partition)
            await until(lambda: max(len(members.shares(each)) for each in range(4)) > 1)
        await sender.send(300, producer)
        await members.until(lambda: members.total == 1200 and all(len(members.shares(each)) > 0 for each in range(4)))
        members.check(sender.sent)


def stock_consumer(address: str, group: str) -> Any:
    """A member of librdkafka, in the consumer protocol."""
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 200,
            "log_level": 0,
        }
    )
