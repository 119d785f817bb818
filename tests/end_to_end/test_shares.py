"""Consumers that share partitions by hand: each record to one of them, each key in order, whatever happens."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from anabranch.client import (
    Admin,
    AnabranchError,
    ApiError,
    Consumer,
    ErrorCode,
    Producer,
    RecordFilter,
    TopicPartition,
)
from anabranch.client.cluster.connection import ConnectionSettings
from anabranch.client.consumer.range_reader import RangeReader, RangeReaderSettings, decode_range
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts
from anabranch.machines.partition.sharing import Asked
from anabranch.protocol.messages.fetch import KeyRange
from anabranch.records.shares import KeyShare
from tests.conformance.clients.confluent import ConfluentKafka
from tests.support import commands
from tests.support.broker import BrokerProcess, log_size
from tests.support.wire import WireClient, batch

ACCEPTS = {"accept.range.fetch": "true"}
KEYS = 300
Taken = tuple[int, int, bytes | None, bytes]


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("data")).start()
    yield process
    assert not process.said("error"), process.said("error")
    process.kill()


async def _create(address: str, topic: str, partitions: int = 1, **configs: str) -> None:
    async with Admin(address) as admin:
        await admin.create_topics(topic, partitions=partitions, configs={**ACCEPTS, **configs})


async def _fill(address: str, topic: str, count: int, *, first: int = 0, keyless: float = 0.0, **settings: Any) -> None:
    chance = random.Random(first)
    async with Producer(address, linger_ms=5, **settings) as producer:
        for number in range(first, first + count):
            key = None if chance.random() < keyless else b"k%d" % chance.randrange(KEYS)
            await producer.send(topic, b"%d" % number, key=key)


class Sharer:
    """A consumer of a share of all partitions of a topic, and what it was given."""

    def __init__(self, address: str, topic: str, share: tuple[int, int], **settings: Any) -> None:
        self.taken: list[Taken] = []
        self._consumer = Consumer(address, auto_offset_reset="earliest", **settings)
        self._consumer.assign({topic: [share]})
        self._topic = topic

    async def run(self) -> None:
        try:
            while True:
                for record in await self._consumer.poll(0.2):
                    self.taken.append((record.partition, record.offset, record.key, record.value or b""))
        finally:
            await self._consumer.close()


@asynccontextmanager
async def _sharing(address: str, topic: str, count: int, **settings: Any) -> AsyncIterator[list[Sharer]]:
    sharers = [Sharer(address, topic, share, **settings) for share in cuts(SPACE, count)]
    tasks = [asyncio.create_task(sharer.run()) for sharer in sharers]
    try:
        yield sharers
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _until(sharers: list[Sharer], count: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while sum(len(sharer.taken) for sharer in sharers) < count:
        assert time.monotonic() < deadline, [len(sharer.taken) for sharer in sharers]
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)  # None comes twice.


def _check(sharers: list[Sharer], count: int, *, share_min: float = 0.15) -> None:
    """Each record was taken once, each key by one sharer and in order."""
    every = [record for sharer in sharers for record in sharer.taken]
    assert sorted(int(value) for _, _, _, value in every) == list(range(count))
    owners: dict[bytes, int] = {}
    for place, sharer in enumerate(sharers):
        last: dict[bytes, int] = {}
        for _, _, key, value in sharer.taken:
            if key is not None:
                assert owners.setdefault(key, place) == place
                assert int(value) > last.get(key, -1)
                last[key] = int(value)
        assert len(sharer.taken) >= share_min * count


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
@in_loop
async def test_sharers_are_given_each_record_once(broker: BrokerProcess, compression: str) -> None:
    topic = f"once-{compression}"
    await _create(broker.address, topic)
    await _fill(broker.address, topic, 3_000, keyless=0.3, compression_type=compression)
    async with _sharing(broker.address, topic, 3) as sharers:
        await _until(sharers, 3_000)
        await _fill(broker.address, topic, 3_000, first=3_000, keyless=0.3, compression_type=compression)
        await _until(sharers, 6_000)
    _check(sharers, 6_000)


@in_loop
async def test_one_pass_serves_those_who_share_and_what_is_kept_goes(broker: BrokerProcess) -> None:
    await _create(broker.address, "passes", **{"reserve.message.value.range.fetch": "true"})
    async with _sharing(broker.address, "passes", 4) as sharers:
        await asyncio.sleep(0.5)  # Until the leader has heard of all of them.
        before = broker.metrics()
        for part in range(10):
            await _fill(broker.address, "passes", 400, first=400 * part)
            await _until(sharers, 400 * (part + 1))
    _check(sharers, 4_000)
    found = {
        name: value - before[name] for name, value in broker.metrics().items() if name.startswith("anabranch_filter")
    }
    assert found["anabranch_filter_kept_answers_total"] >= 2 * found["anabranch_filter_passes_total"]
    assert broker.metrics()["anabranch_filter_kept_bytes"] == 0


def test_what_is_kept_for_sharers_goes_with_the_topic(broker: BrokerProcess) -> None:
    def kept() -> float:
        return broker.metrics()["anabranch_filter_kept_bytes"]

    def read(part: Interval, offset: int) -> Any:
        request = client.fetch_request(topic, {0: offset})
        request.topics[0].partitions[0].key_ranges = [KeyRange(start=part.start, end=part.end)]
        return client.call(request, 17).responses[0].partitions[0]

    with WireClient(broker.port) as client:
        topic = client.create("gone", accept_range_fetch="true", reserve_message_value_range_fetch="true")
        before = kept()
        one, other = cuts(SPACE, 2)
        for number in range(100):
            client.produce(topic, 0, batch([b"v" * 100], key=b"k%d" % number))
            if not number:
                read(other, 0)
        assert 0 < len(read(one, 1).records) < 100 * 200
        assert kept() > before, "the half that the other reads is kept for it"
        client.delete("gone")
        assert kept() == before


@in_loop
async def test_sharers_go_through_resizes(broker: BrokerProcess) -> None:
    await _create(broker.address, "grows", 2)
    await _fill(broker.address, "grows", 4_000, keyless=0.2)
    async with Admin(broker.address) as admin, _sharing(broker.address, "grows", 3, metadata_max_age_ms=500) as sharers:
        for part, count in enumerate((3, 5, 2, 4), 1):
            await admin.resize("grows", count)
            await _fill(broker.address, "grows", 2_000, first=2_000 + 2_000 * part, keyless=0.2)
        await _until(sharers, 12_000)
    _check(sharers, 12_000)
    assert len({partition for sharer in sharers for partition, *_ in sharer.taken}) == 5


@in_loop
async def test_sharers_outlive_a_broker_that_is_killed(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = "127.0.0.1:{1}".format(*listener.getsockname())
    process = BrokerProcess(tmp_path, durability="fsync", listeners=address).start()
    await _create(address, "killed", 2)
    async with _sharing(address, "killed", 3, retry_backoff_ms=50) as sharers:
        for part in range(3):
            filling = asyncio.create_task(_fill(address, "killed", 2_000, first=2_000 * part, enable_idempotence=True))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(process.kill)
            await asyncio.to_thread(process.start)
            await filling
        await _until(sharers, 6_000)
    _check(sharers, 6_000)
    assert not process.said("error"), process.said("error")
    process.kill()


@in_loop
async def test_only_committed_records_are_shared(broker: BrokerProcess) -> None:
    await _create(broker.address, "committed")
    committed = 0
    async with (
        Producer(broker.address, transactional_id="t") as producer,
        _sharing(broker.address, "committed", 2, isolation_level="read_committed") as sharers,
    ):
        await producer.init_transactions()
        for turn in range(12):
            await producer.begin_transaction()
            for number in range(100):
                value = committed + number if turn % 3 else -1
                await producer.send("committed", b"%d" % value, key=b"k%d" % number)
            if turn % 3:
                await producer.commit_transaction()
                committed += 100
            else:
                await producer.abort_transaction()
        await _until(sharers, committed)
        await producer.begin_transaction()
        await (await producer.send("committed", b"-2", key=b"open"))
        await asyncio.sleep(0.5)
        await producer.abort_transaction()
    _check(sharers, committed)


@in_loop
async def test_a_compacted_topic_is_shared(broker: BrokerProcess) -> None:
    configs = {"cleanup.policy": "compact", "segment.bytes": "20000", "min.cleanable.dirty.ratio": "0.01"}
    await _create(broker.address, "compacted", **configs)
    await _fill(broker.address, "compacted", 4_000)
    deadline = time.monotonic() + 60
    async with Consumer(broker.address, auto_offset_reset="earliest") as whole:
        whole.assign("compacted")
        expected = {}
        while await whole.position("compacted", 0) < 4_000:
            expected.update({record.key: record.value for record in await whole.poll(1.0)})
    async with _sharing(broker.address, "compacted", 3) as sharers:
        last: dict[bytes | None, bytes] = {}
        while last != expected:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
            last = {key: value for sharer in sharers for _, _, key, value in sharer.taken}


@in_loop
async def test_a_topic_that_is_not_shared_says_so(broker: BrokerProcess) -> None:
    async with Admin(broker.address) as admin:
        await admin.create_topics("whole", partitions=1)
    await _fill(broker.address, "whole", 10)
    async with Consumer(broker.address, auto_offset_reset="earliest") as consumer:
        consumer.assign({("whole", 0): [(0, 5)]})
        with pytest.raises(ApiError, match=r"accept\.range\.fetch=true") as refused:
            await consumer.poll(10.0)
        assert refused.value.code is ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED
        consumer.assign({("whole", 0): []})
        assert len(await consumer.poll(10.0)) == 10


@in_loop
async def test_ranges_that_are_none_are_refused(broker: BrokerProcess) -> None:
    async with Consumer(broker.address) as consumer:
        for ranges in ([(5, 4)], [(-1, 4)], [(0, SPACE_END + 1)], [(0, 10), (10, 20)]):
            with pytest.raises(ValueError, match="do not overlap"):
                consumer.assign({"t": ranges})


@in_loop
async def test_a_poll_filters_by_key_and_size(broker: BrokerProcess) -> None:
    await _create(broker.address, "filtered")
    await _fill(broker.address, "filtered", 2_000)
    async with Consumer(broker.address, auto_offset_reset="earliest", fetch_max_wait_ms=100) as consumer:
        consumer.assign("filtered")

        async def every(wanted: RecordFilter) -> list[tuple[bytes | None, int]]:
            await consumer.seek("filtered", 0, 0)
            found: list[tuple[bytes | None, int]] = []
            while await consumer.position("filtered", 0) < 2_000:
                polled = await consumer.poll(1.0, filter=wanted)
                found += [(record.key, len(record.key or b"") + len(record.value or b"")) for record in polled]
            return found

        all_of_them = await every(RecordFilter())
        assert len(all_of_them) == 2_000
        two = (b"k1", b"k250")
        assert await every(RecordFilter(keys=two)) == [it for it in all_of_them if it[0] in two]
        assert await every(RecordFilter(keys_refused=two)) == [it for it in all_of_them if it[0] not in two]
        assert await every(RecordFilter(size_min=7)) == [it for it in all_of_them if it[1] >= 7]
        assert await every(RecordFilter(size_max=5)) == [it for it in all_of_them if it[1] <= 5]
        assert await every(RecordFilter(keys=(b"nobody's",))) == []


@pytest.mark.parametrize("repeats", [200, 20_000], ids=["copied", "sent from where they lie"])
def test_a_batch_that_has_changed_since_it_was_written_is_given_to_no_sharer(tmp_path: Path, repeats: int) -> None:
    """It was given on, under a new checksum that was right; and an error of the broker's was tried for ever, unsaid."""
    process = BrokerProcess(tmp_path, log_scrub_interval_ms=86_400_000).start()
    found: list[bytes | None] = []

    async def fill() -> None:
        await _create(process.address, "changed", **ACCEPTS)
        async with Producer(process.address) as producer:
            for value in ("first", "second", "third"):
                await (await producer.send("changed", value * repeats, key="k"))

    async def read() -> None:
        async with Consumer(process.address, auto_offset_reset="earliest") as consumer, asyncio.timeout(20):
            consumer.assign({("changed", 0): [(0, SPACE_END)]})
            while True:
                found.extend(record.value for record in await consumer.poll(0.5))

    asyncio.run(fill())
    log = next(tmp_path.glob("**/changed-0/*.log"))
    log.write_bytes(log.read_bytes().replace(b"secondsecond", b"secondsecone", 1))
    with pytest.raises(ApiError, match="CORRUPT_MESSAGE"):
        asyncio.run(read())
    assert found == [b"first" * repeats]
    process.kill()


@in_loop
async def test_a_fetch_wakes_for_what_it_wants_alone(broker: BrokerProcess) -> None:
    """A fetch of nobody's key waits through others' records; one of a key that comes is answered at once."""
    await _create(broker.address, "wakes")
    async with Consumer(broker.address, auto_offset_reset="earliest", fetch_max_wait_ms=20_000) as consumer:
        consumer.assign("wakes")
        wanted = RecordFilter(keys=(b"mine",))
        poll = asyncio.create_task(consumer.poll(30.0, filter=wanted))
        await asyncio.sleep(0.5)
        before = broker.metrics()
        for number in range(5):
            await _fill(broker.address, "wakes", 10, first=number)
            await asyncio.sleep(0.1)
        assert not poll.done()
        answered = 'kafka_network_requestmetrics_requests_total{request="Fetch"}'
        counted = [name for name in before if "equests_total" in name and "Fetch" in name]
        after = broker.metrics()
        assert all(after[name] - before[name] <= 1 for name in counted), answered
        began = time.monotonic()
        async with Producer(broker.address) as producer:
            await (await producer.send("wakes", b"x", key=b"mine"))
        assert [record.key for record in await poll] == [b"mine"]
        assert time.monotonic() - began < 10


@in_loop
async def test_stock_consumers_beside_sharers_read_everything(broker: BrokerProcess) -> None:
    await _create(broker.address, "beside", 2)
    await _fill(broker.address, "beside", 3_000, keyless=0.2)
    async with _sharing(broker.address, "beside", 3) as sharers:
        stock = ConfluentKafka(broker.address)
        ends = {number: end for number, (_, end) in stock.offsets("beside").items()}
        found = await asyncio.to_thread(stock.fetch, "beside", ends)
        stock.close()
        await _until(sharers, 3_000)
    _check(sharers, 3_000)
    assert sorted(int(it.record.value or b"") for each in found.values() for it in each) == list(range(3_000))


class Whole(NamedTuple):
    """All offsets of a partition."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str = ""


@pytest.mark.parametrize("accepts", [True, False])
def test_readers_of_key_ranges_divide_the_bytes_where_that_is_allowed(broker: BrokerProcess, accepts: bool) -> None:
    """As Spark's tasks read: with the broker's filter, or without."""
    topic = f"tasks-{accepts}"
    configs = {"accept.range.fetch": "true"} if accepts else {}
    asyncio.run(_create(broker.address, topic, **{"accept.range.fetch": "false", **configs}))
    asyncio.run(_fill(broker.address, topic, 20_000, keyless=0.2))
    size = log_size(broker.data / f"{topic}-0")
    found: list[int] = []
    fetched_size = 0
    for keys in cuts(SPACE, 4):
        reader = RangeReader(broker.address, ConnectionSettings(), RangeReaderSettings(), _never_gone)
        for fetched in reader.read([Whole(topic, 0, 0, 20_000)], Asked((keys,))):
            assert fetched.filtered is accepts
            fetched_size += len(fetched.data)
            share = None if accepts else KeyShare(keys, 1, SPACE)
            tp = TopicPartition(topic, 0)
            for records in decode_range(tp, fetched.data, fetched.start, 20_000, columns=("value",), share=share):
                found += map(int, records.column(0).to_pylist())
    assert sorted(found) == list(range(20_000))
    assert fetched_size <= 1.3 * size if accepts else fetched_size >= 3.9 * size


def _never_gone(wanted: object, gone: AnabranchError) -> None:
    raise gone


def test_shares_are_consumed_from_the_command_line(broker: BrokerProcess) -> None:
    commands.run(broker.address, "topic", "create", "line", "--partitions", 2)
    commands.run(broker.address, "topic", "config", "line", "accept.range.fetch=true")
    asyncio.run(_fill(broker.address, "line", 500))
    parts = []
    for share in ("1/2", f"{SPACE_END // 2 + 1}-{SPACE_END}"):
        out, _ = commands.run(broker.address, "consume", "line", "--format", "value", "--until-end", "--share", share)
        parts.append([int(line) for line in out.splitlines()])
    assert min(map(len, parts)) > 100
    assert sorted(parts[0] + parts[1]) == list(range(500))


def test_shares_by_hand_are_committed_for_a_group_on_the_command_line(broker: BrokerProcess) -> None:
    commands.run(broker.address, "topic", "create", "kept", "--partitions", 2)
    commands.run(broker.address, "topic", "config", "kept", "accept.range.fetch=true")
    asyncio.run(_fill(broker.address, "kept", 300))

    def printed(share: str, *words: object) -> list[int]:
        command = ("consume", "kept", "--format", "value", "--until-end", "--group", "keeper", "--share", share)
        return [int(line) for line in commands.run(broker.address, *command, *words)[0].splitlines()]

    begun, rest = printed("1/2", "--limit", 20), printed("1/2")
    assert len(begun) == 20
    assert printed("1/2") == []
    others = printed("2/2")
    assert min(map(len, (rest, others))) > 50
    assert sorted(begun + rest + others) == list(range(300)), "each half goes on where it was, and is no other's"


def test_records_are_filtered_from_the_command_line(broker: BrokerProcess) -> None:
    commands.run(broker.address, "topic", "create", "chosen")
    words = ("consume", "chosen", "--format", "json", "--until-end")
    asyncio.run(_fill(broker.address, "chosen", 600))

    def printed(*options: object, code: int = 0) -> tuple[list[tuple[str, str]], str]:
        out, error = commands.run(broker.address, *words, *options, code=code)
        return [(row["key"], row["value"]) for row in map(json.loads, out.splitlines())], error

    everything, _ = printed()
    assert len(everything) == 600, "without a filter the topic need not allow one"
    assert "TOPIC_RANGE_FETCH_NOT_ALLOWED" in printed("--key", "k1", code=1)[1]
    commands.run(broker.address, "topic", "config", "chosen", "accept.range.fetch=true")
    two = {everything[0][0], everything[1][0]}
    named = [word for key in sorted(two) for word in ("--key", key)]
    assert printed(*named)[0] == [it for it in everything if it[0] in two]
    refused = [word for key in sorted(two) for word in ("--refuse-key", key)]
    assert printed(*refused)[0] == [it for it in everything if it[0] not in two]
    sized = [it for it in everything if 5 <= len(it[0] + it[1]) <= 6]
    assert 0 < len(sized) < 600
    assert printed("--min-size", 5, "--max-size", 6)[0] == sized
    assert printed("--min-size", 5, "--max-size", 6, "--limit", 3)[0] == sized[:3]
    assert "--share any takes every record" in printed("--group", "g", "--share", "any", "--key", "k", code=2)[1]
