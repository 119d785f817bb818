"""The rules of tables at a real broker, one by one: what is refused, what is kept, where a table begins."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from anabranch.client import (
    Admin,
    ApiError,
    Consumer,
    ErrorCode,
    KeyedTable,
    KeyNotOwnedError,
    OffsetAndMetadata,
    Producer,
    Record,
    RejectError,
    TopicPartition,
)
from anabranch.client import sync as plain
from anabranch.machines.keyspace import SPACE, Interval, cuts, spread
from anabranch.machines.placement import place
from anabranch.records.hashing import murmur2, placement_hash
from tests.end_to_end.test_keyed_tables import QUICK, changelog_of
from tests.support.broker import ROOT, BrokerProcess, running
from tests.support.examples import python_examples
from tests.support.thorough import THOROUGH

BALANCES = ROOT / "examples/balances.py"
KEYS = [b"key-%d" % number for number in range(30)]
count = 0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data"), **QUICK) as process:
        yield process


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


@pytest.fixture
def topic() -> str:
    global count
    count += 1
    return f"tables-{count}"


@asynccontextmanager
async def made(
    address: str,
    topic: str,
    group: str | None = None,
    *,
    progress: str | None = None,
    name: str | None = None,
    **more: Any,
) -> AsyncIterator[tuple[Consumer, KeyedTable]]:
    """A consumer with a table `counts` of the topic."""
    settings = {"auto_offset_reset": "earliest", "enable_auto_commit": False, **more}
    async with Consumer(address, group_id=group, **settings) as consumer:
        table = KeyedTable(consumer, f"{topic}-counts", topic, progress=progress, transactional_id=name)
        if group is not None:
            consumer.subscribe(topic)
        yield consumer, table


@asynccontextmanager
async def made_by_hand(
    address: str, topic: str, *, by_group: bool = True, **settings: Any
) -> AsyncIterator[tuple[Consumer, KeyedTable]]:
    """A consumer that assigns by hand, with a table `counts`; the group that commits for it has the topic's name."""
    given = {"auto_offset_reset": "earliest", "enable_auto_commit": False, **settings}
    async with Consumer(address, group_id=topic if by_group else None, **given) as consumer:
        progress = None if by_group else topic
        yield consumer, KeyedTable(consumer, f"{topic}-counts", topic, progress=progress, transactional_id=topic)


async def send(address: str, topic: str, *keys: bytes | None) -> None:
    async with Producer(address) as producer:
        for key in keys:
            await producer.send(topic, b"1", key=key)


async def count_some(consumer: Consumer, table: KeyedTable, records: int) -> None:
    """Count that many records by key."""
    async with asyncio.timeout(30):
        while records > 0:
            for record in await consumer.poll(0.2):
                assert record.key is not None
                table.put(record.key, b"%d" % (int(table.get(record.key) or b"0") + 1))
                records -= 1
    assert records == 0


async def refused(call: Callable[[], Awaitable[Any]], text: str, code: ErrorCode) -> None:
    async def go_on() -> None:
        while True:
            await call()

    with pytest.raises(ApiError, match=text) as failed:
        await asyncio.wait_for(go_on(), 30)
    assert failed.value.code is code


def test_a_table_is_there_again_after_a_restart_and_what_was_not_committed_is_not(address: str, topic: str) -> None:
    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=2)
        await send(address, topic, *KEYS, *KEYS[:10])
        async with made(address, topic, topic) as (consumer, table):
            with pytest.raises(KeyNotOwnedError):
                table.get(KEYS[0])
            await count_some(consumer, table, 40)
            table.delete(KEYS[29])
            assert (table.get(KEYS[0]), table.get(KEYS[29])) == (b"2", None)
            assert table.unflushed_size > 0
            await table.flush()
            assert (table.unflushed_size, table.entries) == (0, 29)
            await send(address, topic, *KEYS)
            await count_some(consumer, table, 30)  # Never committed.
            assert table.get(KEYS[0]) == b"3"
        expected = dict.fromkeys(KEYS[:10], b"2") | dict.fromkeys(KEYS[10:29], b"1")
        assert await changelog_of(address, f"{topic}-counts") == expected
        async with made(address, topic, topic) as (consumer, table):
            await count_some(consumer, table, 30)
            assert dict(table.items()) == dict.fromkeys(KEYS[:10], b"3") | dict.fromkeys(KEYS[10:29], b"2") | {
                KEYS[29]: b"1"
            }
            await table.flush()
        async with made(address, topic, topic) as (consumer, table):
            while not table.ready:  # Without a record to process.
                assert await consumer.poll(0.1) == []
            assert table.get(KEYS[0]) == b"3"
            owner = await table.owner_of(KEYS[0])
            assert owner.member is not None and owner.member.member_id == consumer.group_metadata().member_id
            assert owner.partition in consumer.assignment()

    asyncio.run(run())


def test_entries_outlive_two_growths_at_once(address: str, topic: str) -> None:
    """The second of two narrowings threw away what the first one had left: entries of keys that had not moved."""

    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=2)
            await send(address, topic, *KEYS)
            async with made(address, topic, topic) as (consumer, table):
                await count_some(consumer, table, len(KEYS))
                await table.flush()
                await admin.resize(topic, 4)
                await admin.resize(topic, 6)
                await send(address, topic, *KEYS)
                await count_some(consumer, table, len(KEYS))
                assert dict(table.items()) == dict.fromkeys(KEYS, b"2")
                await table.flush()
            assert await changelog_of(address, f"{topic}-counts") == dict.fromkeys(KEYS, b"2")

    asyncio.run(run())


def test_offsets_are_not_committed_without_the_changes_before_them(address: str, topic: str) -> None:
    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1)
        await send(address, topic, KEYS[0])
        async with made(address, topic, topic) as (consumer, table):
            await count_some(consumer, table, 1)
            table.put(KEYS[0], b"x" * 2_000_000)  # More than a record may have.
            with pytest.raises(ApiError, match="MESSAGE_TOO_LARGE"):
                await table.flush()
            assert await consumer.committed() == {TopicPartition(topic, 0): None}
            assert await changelog_of(address, f"{topic}-counts") == {}
            table.put(KEYS[0], b"1")
            await table.flush()
            committed = (await consumer.committed())[TopicPartition(topic, 0)]
            assert committed is not None and committed.offset == 1
        assert await changelog_of(address, f"{topic}-counts") == {KEYS[0]: b"1"}

    asyncio.run(run())


def test_a_member_of_an_old_epoch_writes_nothing_to_the_changelog(address: str, topic: str) -> None:
    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=2)
        await send(address, topic, *KEYS)
        async with made(address, topic, topic) as (consumer, table), made(address, topic, topic) as (other, _):
            await count_some(consumer, table, 30)
            await table.flush()
            old = consumer.group_metadata()
            while len(other.assignment()) < 1 or consumer.group_metadata() == old:
                await asyncio.gather(consumer.poll(0.05), other.poll(0.05))
            (tp,) = consumer.assignment()
            await send(address, topic, *KEYS)
            while not (some := await consumer.poll(0.2)):
                pass
            key = some[0].key
            assert key is not None
            table.put(key, b"late")
            state = consumer.driver.state
            assert state is not None
            offsets = {tp: OffsetAndMetadata(await consumer.position(*tp))}
            with pytest.raises(ApiError):
                await state.commit(offsets, old)
            assert set((await changelog_of(address, f"{topic}-counts")).values()) == {b"1"}
            await state.commit(offsets, consumer.group_metadata())
            assert (await changelog_of(address, f"{topic}-counts"))[key] == b"late"

    asyncio.run(run())


def test_a_commit_of_a_member_that_was_out_of_its_group_meanwhile_does_not_set_the_group_back(
    address: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is back with the same id: its old epoch is stale, and under the new one it would commit what it was at."""

    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1)
        await send(address, topic, *KEYS)
        tp = TopicPartition(topic, 0)
        async with made(address, topic, topic, max_poll_interval_ms=1_000) as (consumer, table):
            await count_some(consumer, table, 30)
            state = consumer.driver.state
            assert state is not None
            begun, go_on, commit_now = asyncio.Event(), asyncio.Event(), state.commit

            async def commit_late(*given: Any) -> None:
                begun.set()
                await go_on.wait()
                await commit_now(*given)

            monkeypatch.setattr(state, "commit", commit_late)
            old = consumer.group_metadata()
            late = asyncio.create_task(consumer.commit())
            await begun.wait()
            async with made(address, topic, topic) as (other, table_of_other):
                await count_some(other, table_of_other, 30)  # The member does not poll, and is put out.
                await send(address, topic, *KEYS)
                await count_some(other, table_of_other, 30)
                await table_of_other.flush()
                async with asyncio.timeout(30):
                    while consumer.group_metadata().generation_id <= old.generation_id:
                        await asyncio.gather(consumer.poll(0.05), other.poll(0.05))
                assert consumer.group_metadata().member_id == old.member_id
                go_on.set()
                (outcome,) = await asyncio.gather(late, return_exceptions=True)
                at = (await other.committed((topic, 0)))[tp]
                assert at is not None and at.offset == 60
                assert isinstance(outcome, ApiError) and outcome.code is ErrorCode.STALE_MEMBER_EPOCH
            await send(address, topic, *KEYS)
            await count_some(consumer, table, 30)
            await table.flush()
        assert await changelog_of(address, f"{topic}-counts") == dict.fromkeys(KEYS, b"3")

    asyncio.run(run())


def test_a_member_waits_for_the_open_transaction_of_the_one_before(address: str, topic: str) -> None:
    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1)
            await admin.create_topics(f"{topic}-counts", partitions=1, configs={"cleanup.policy": "compact"})
        await send(address, topic, KEYS[0], KEYS[0])
        async with Producer(address, transactional_id=topic) as before:
            await before.init_transactions()
            await before.begin_transaction()
            await before.send(f"{topic}-counts", b"7", key=KEYS[0])
            await before.flush()
            async with made(address, topic, topic) as (consumer, table):
                while not consumer.assignment():
                    assert await consumer.poll(0.1) == []
                assert await consumer.poll(1) == [] and not table.ready  # The changes may become committed yet.
            await before.send_offsets_to_transaction({(topic, 0): 1}, topic)
            async with made(address, topic, topic) as (consumer, table):
                while not consumer.assignment():
                    assert await consumer.poll(0.1) == []
                assert await consumer.poll(1) == []  # Nor is it known where to begin.
                await before.commit_transaction()
                while not (records := await consumer.poll(0.2)):
                    pass
                assert [record.offset for record in records] == [1]
                assert table.get(KEYS[0]) == b"7"

    asyncio.run(run())


def test_a_topic_that_cannot_be_the_changelog_is_refused_with_a_sentence(address: str, topic: str) -> None:
    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=2)
            await send(address, topic, KEYS[0])
            await admin.create_topics(f"{topic}-counts", partitions=2)
            async with made(address, topic, topic) as (consumer, _):
                await refused(consumer.poll, "needs compact", ErrorCode.INVALID_CONFIG)
            await admin.delete_topics(f"{topic}-counts")
            await admin.create_topics(f"{topic}-counts", partitions=3, configs={"cleanup.policy": "compact"})
            async with made(address, topic, topic) as (consumer, _):
                await refused(consumer.poll, "a changelog has as many", ErrorCode.INVALID_PARTITIONS)
            await admin.delete_topics(f"{topic}-counts")
            async with made(address, topic, topic) as (consumer, table):
                await count_some(consumer, table, 1)
                await table.flush()
            await admin.delete_topics(f"{topic}-counts")
            async with made(address, topic, topic) as (consumer, _):
                await refused(consumer.poll, "its state is lost", ErrorCode.INVALID_REQUEST)
            await admin.delete_group_offsets(topic, [(topic, 0), (topic, 1)])
            async with made(address, topic, topic) as (consumer, table):
                await count_some(consumer, table, 1)
                assert table.items() == [(KEYS[0], b"1")]

    asyncio.run(run())


def test_a_changelog_whose_broker_filters_nothing_is_read_whole(address: str, topic: str) -> None:
    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1)
            await admin.create_topics(f"{topic}-counts", partitions=1, configs={"cleanup.policy": "compact"})
        await send(address, topic, *KEYS)
        async with made(address, topic, topic) as (consumer, table):
            await count_some(consumer, table, 30)
            await table.flush()
        async with made(address, topic, topic) as (consumer, table):
            while not table.ready:
                await consumer.poll(0.1)
            assert dict(table.items()) == dict.fromkeys(KEYS, b"1")

    asyncio.run(run())


def test_shares_by_hand_each_with_the_entries_of_its_keys_and_its_progress(address: str, topic: str) -> None:
    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=2, configs={"accept.range.fetch": "true"})
            shares = cuts(SPACE, 3)
            await send(address, topic, *KEYS)
            found: dict[bytes, bytes] = {}
            for number, share in enumerate(shares):
                async with made(address, topic, progress=topic, name=f"{topic}-{number}") as (consumer, table):
                    consumer.assign({topic: [share]})
                    await count_some(consumer, table, len(keys_of(share)))
                    await table.flush()
                    assert not found.keys() & dict(table.items()).keys()
                    found |= dict(table.items())
            assert found == dict.fromkeys(KEYS, b"1")
            await admin.resize(topic, 5)
            await send(address, topic, *KEYS, *KEYS)
            for number, share in enumerate(shares):
                async with made(address, topic, progress=topic, name=f"{topic}-{number}") as (consumer, table):
                    consumer.assign({topic: [share]})
                    await count_some(consumer, table, 2 * len(keys_of(share)))
                    await table.flush()
            assert await changelog_of(address, f"{topic}-counts") == dict.fromkeys(KEYS, b"3")
            async with made(address, topic, progress=topic, name=f"{topic}-0") as (consumer, _):
                consumer.assign({topic: cuts(SPACE, 2)[:1]})
                assert await consumer.poll(1) == []  # Everything is processed, by whomever.
            async with made(address, topic, progress=topic, name=f"{topic}-0") as (consumer, table):
                await send(address, topic, *KEYS)
                consumer.assign({topic: shares[:1]})
                await count_some(consumer, table, len(keys_of(shares[0])))
                await table.flush()
            async with made(address, topic, progress=topic, name=f"{topic}-0") as (consumer, _):
                consumer.assign({topic: cuts(SPACE, 2)[:1]})
                await refused(consumer.poll, "processed up to the same offset", ErrorCode.INVALID_REQUEST)

    def keys_of(share: Interval) -> list[bytes]:
        return [key for key in KEYS if share.start <= spread(murmur2(key), 2) <= share.end]

    asyncio.run(run())


def test_what_was_not_committed_of_a_share_by_hand_is_processed_anew_by_another_share(address: str, topic: str) -> None:
    """Its keys stand where they are committed: their changes since would count twice."""

    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1, configs={"accept.range.fetch": "true"})
        lower, upper = cuts(SPACE, 2)
        low = [key for key in KEYS if spread(murmur2(key), 1) <= lower.end]
        async with made(address, topic, progress=topic, name=topic) as (consumer, table):
            for number in (1, 2):
                await send(address, topic, *KEYS)
                consumer.assign({topic: []})
                await count_some(consumer, table, len(KEYS))  # Not committed.
                consumer.assign({topic: [lower]})
                await count_some(consumer, table, len(low))
                assert dict(table.items()) == dict.fromkeys(low, b"%d" % number)
                await table.flush()
                consumer.assign({topic: [upper]})
                await count_some(consumer, table, len(KEYS) - len(low))
                await table.flush()
                assert await changelog_of(address, f"{topic}-counts") == dict.fromkeys(KEYS, b"%d" % number)

    asyncio.run(run())


def test_the_owner_of_a_key_is_not_the_former_one_where_a_marker_follows_the_last_commit(
    address: str, topic: str
) -> None:
    """The layout ends in a marker: what is committed by record lies before its end, and nothing is left to read."""

    async def run() -> None:
        async with Admin(address) as admin, Producer(address, transactional_id=topic) as producer:
            await admin.create_topics(topic, partitions=1)
            await producer.init_transactions()
            await producer.begin_transaction()
            for key in KEYS:
                await producer.send(topic, b"1", key=key)
            await producer.commit_transaction()
            await admin.resize(topic, 2)
        moved = next(key for key in KEYS if place(placement_hash(key), 1, 2) == 1)
        await send(address, topic, moved)
        async with made(address, topic, topic) as (consumer, table):
            left = await polled(consumer, len(KEYS))
            assert (await table.owner_of(moved)).partition.partition == 0, "not all is read"
            await consumer.commit({(topic, 0): left[-1].offset + 1})
            (record,) = await polled(consumer, 1)
            assert (record.key, record.partition) == (moved, 1)
            owner = await table.owner_of(moved)
            assert owner.partition.partition == 1 and owner.member is not None and table.owns(moved)

    asyncio.run(run())


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_share_by_hand_that_is_assigned_again_begins_where_its_keys_stand(
    address: str, topic: str, reset: str
) -> None:
    """Without a poll in between it began as `auto_offset_reset` says: records counted twice, or were left out."""

    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1, configs={"accept.range.fetch": "true"})
        lower, upper = cuts(SPACE, 2)
        low = [key for key in KEYS if spread(murmur2(key), 1) <= lower.end]
        await send(address, topic, *KEYS)
        async with made(address, topic, progress=topic, name=topic) as (consumer, table):
            consumer.assign({(topic, 0): [lower]})
            await count_some(consumer, table, len(low))
            await table.flush()
        async with made(address, topic, progress=topic, name=topic, auto_offset_reset=reset) as (consumer, table):
            consumer.assign({(topic, 0): [lower]})
            await consumer.poll(1)
            await send(address, topic, *KEYS)
            consumer.assign([])
            consumer.assign({(topic, 0): [lower]})
            await count_some(consumer, table, len(low))
            assert dict(table.items()) == dict.fromkeys(low, b"2")
            consumer.assign({(topic, 0): [upper]})
            await consumer.seek(topic, 0, len(KEYS))
            await table.flush()
        async with Admin(address) as admin:
            committed = (await admin.list_group_offsets(topic))[TopicPartition(topic, 0)]
        assert [offset for _, _, offset in committed.shares] == [len(KEYS), 0], "a flush that knows no place is none"

    asyncio.run(run())


def test_what_was_not_committed_of_a_partition_by_hand_is_processed_anew_when_it_is_assigned_again(
    address: str, topic: str
) -> None:
    """With a group that commits for it and no members: what it gave up it kept, and counted on."""

    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=2)
        keys = [[key for key in KEYS if place(placement_hash(key), 2, 2) == number] for number in (0, 1)]
        async with made_by_hand(address, topic) as (consumer, table):
            for number in (1, 2):
                await send(address, topic, *KEYS)
                consumer.assign(topic)
                await count_some(consumer, table, len(KEYS))  # Not committed.
                consumer.assign([(topic, 1)])
                assert dict(table.items()) == dict.fromkeys(keys[1], b"%d" % number)
                await table.flush()
                consumer.assign(topic)
                await count_some(consumer, table, len(keys[0]))
                assert dict(table.items()) == dict.fromkeys(KEYS, b"%d" % number)
                await table.flush()
        assert await changelog_of(address, f"{topic}-counts") == dict.fromkeys(KEYS, b"2")

    asyncio.run(run())


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("polls", [False, True])
def test_keys_that_are_given_up_by_hand_and_come_back_are_processed_anew(
    address: str, topic: str, by_group: bool, polls: bool
) -> None:
    """The others, of the same partition, were further: offsets were committed without what these keys had changed."""

    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1, configs={"accept.range.fetch": "true"})
        lower, upper = cuts(SPACE, 2)
        await send(address, topic, *KEYS)
        async with made_by_hand(address, topic, by_group=by_group) as (consumer, table):
            consumer.assign({(topic, 0): [lower, upper]})
            await count_some(consumer, table, len(KEYS))  # Not committed.
            consumer.assign({(topic, 0): [lower]})
            if polls:
                await consumer.poll(0.3)
            consumer.assign({(topic, 0): [lower, upper]})
            await count_some(consumer, table, len(KEYS))
            assert dict(table.items()) == dict.fromkeys(KEYS, b"1")
            await table.flush()
        assert await changelog_of(address, f"{topic}-counts") == dict.fromkeys(KEYS, b"1")

    asyncio.run(run())


def test_further_keys_by_hand_take_nothing_of_what_was_read_before_anything_was_committed(
    address: str, topic: str
) -> None:
    """The partition begins where it began, and not at its end of now; what the application has set stays."""

    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1, configs={"accept.range.fetch": "true"})
        lower, upper = cuts(SPACE, 2)
        low = [key for key in KEYS if spread(murmur2(key), 1) <= lower.end]
        await send(address, topic, *KEYS)
        async with made_by_hand(address, topic, auto_offset_reset="latest") as (consumer, table):
            consumer.assign({(topic, 0): [lower]})
            assert await consumer.position(topic, 0) == len(KEYS)
            await send(address, topic, *KEYS)
            await count_some(consumer, table, len(low))
            consumer.assign({(topic, 0): [lower, upper]})
            await count_some(consumer, table, len(KEYS))
            assert dict(table.items()) == dict.fromkeys(KEYS, b"1")
            await table.flush()
            consumer.assign({(topic, 0): [lower]})
            await consumer.pause((topic, 0))
            await consumer.seek(topic, 0, 7)
            consumer.assign({(topic, 0): [lower, upper]})
            assert await consumer.position(topic, 0) == 7 and consumer.paused()
        assert await changelog_of(address, f"{topic}-counts") == dict.fromkeys(KEYS, b"1")

    asyncio.run(run())


def test_changes_that_were_not_committed_go_with_the_range_of_their_keys(address: str, topic: str) -> None:
    """When the range comes back, they must not overwrite what its owner in between has committed."""

    async def run() -> None:
        shared: dict[str, Any] = {"allow_key_share": True, "acknowledgement_mode": "explicit"}
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1, configs={"accept.range.fetch": "true"})
        await send(address, topic, *KEYS)
        tp, late = TopicPartition(topic, 0), b"late"
        async with made(address, topic, topic, **shared) as (consumer, table):
            for record in await polled(consumer, len(KEYS)):
                table.put(record.key or b"", late, record)
                assert consumer.done(record)
            async with made(address, topic, topic, **shared) as (other, table_of_other):
                async with asyncio.timeout(30):
                    while not (other.key_ranges().get(tp) and consumer.key_ranges().get(tp)):
                        await asyncio.gather(consumer.poll(0.05), other.poll(0.05))
                ((first, last),) = other.key_ranges()[tp]
                theirs = {key for key in KEYS if first <= spread(murmur2(key), 1) <= last}
                assert 0 < len(theirs) < len(KEYS)
                assert {key for key, _ in table.items()} == set(KEYS) - theirs
                assert table.unflushed_size == sum(len(key) + len(late) for key in set(KEYS) - theirs)
                for record in await polled(other, len(theirs)):
                    table_of_other.put(record.key or b"", b"theirs", record)
                    assert other.done(record)
                await table_of_other.flush()
            async with asyncio.timeout(30):
                while consumer.key_ranges()[tp] or not table.ready:
                    assert await consumer.poll(0.05) == []
            assert dict(table.items()) == dict.fromkeys(KEYS, late) | dict.fromkeys(theirs, b"theirs")
            await table.flush()
            assert table.unflushed_size == 0
            found = await changelog_of(address, f"{topic}-counts")
            assert found == dict.fromkeys(KEYS, late) | dict.fromkeys(theirs, b"theirs")

    asyncio.run(run())


async def polled(consumer: Consumer, count: int) -> list[Record]:
    """Return so many records."""
    records: list[Record] = []
    async with asyncio.timeout(30):
        while len(records) < count:
            records += await consumer.poll(0.2)
    assert len(records) == count
    return records


def test_a_second_consumer_of_the_same_name_takes_the_place_of_the_first(address: str, topic: str) -> None:
    async def run() -> None:
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1)
        await send(address, topic, *KEYS)
        async with made(address, topic, progress=topic, name=topic) as (first, late):
            first.assign(topic)
            await count_some(first, late, 30)
            async with made(address, topic, progress=topic, name=topic) as (second, table):
                second.assign(topic)
                await count_some(second, table, 30)
                await table.flush()
            for _ in range(2):
                with pytest.raises(ApiError, match=r"belongs to another producer|has another user"):
                    await late.flush()
            with pytest.raises(ApiError, match="has another user"):
                await first.poll(0.1)
        assert await changelog_of(address, f"{topic}-counts") == dict.fromkeys(KEYS, b"1")

    asyncio.run(run())


def test_the_synchronous_table_is_used_from_the_threads_of_handlers(address: str, topic: str) -> None:
    with plain.Admin(address) as admin:
        admin.create_topics(topic, partitions=2)
    asyncio.run(send(address, topic, *KEYS, *KEYS))
    with plain.Consumer(address, group_id=topic, auto_offset_reset="earliest") as consumer:
        table = plain.KeyedTable(consumer, f"{topic}-counts", topic)
        consumer.subscribe(topic)
        left = [2 * len(KEYS)]

        def handle(record: Record) -> None:
            assert record.key is not None
            table.put(record.key, b"%d" % (int(table.get(record.key) or b"0") + 1))
            if record.delivery_count == 1 and record.offset % 5 == 0:
                raise RejectError
            left[0] -= 1
            if not left[0]:
                consumer.stop()

        consumer.run(handle, parallel=4)
        assert dict(table.items()) == dict.fromkeys(KEYS, b"2")
        table.flush()
        assert table.inner.unflushed_size == 0
        table.wait_ready(KEYS[0], 5)
        assert table.owner_of(KEYS[0]).member is not None
    assert asyncio.run(changelog_of(address, f"{topic}-counts")) == dict.fromkeys(KEYS, b"2")


def test_mistakes_are_named(address: str, topic: str) -> None:
    async def run() -> None:
        async with Consumer(address) as consumer:
            with pytest.raises(ApiError, match="give one"):
                KeyedTable(consumer, "c", topic)
            with pytest.raises(ApiError, match="transactional_id"):
                KeyedTable(consumer, "c", topic, progress="p")
        async with Consumer(address, group_id=topic, share="any") as consumer:
            with pytest.raises(ApiError, match="several members"):
                KeyedTable(consumer, "c", topic)
        async with Consumer(address, group_id=topic) as consumer:
            KeyedTable(consumer, "c", topic)
            with pytest.raises(ApiError, match="several members"):
                consumer.assign([topic], share="any")
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=1)
        await send(address, topic, None, KEYS[0])
        async with made(address, topic, topic, acknowledgement_mode="explicit") as (consumer, table):
            while len(records := await consumer.poll(0.5)) < 2:
                assert not records
            without, record = records
            with pytest.raises(TypeError, match="without a key"):
                table.put(without.key, b"1")  # type: ignore[arg-type]
            with pytest.raises(ApiError, match="name the record"):
                table.put(KEYS[0], b"1")
            with pytest.raises(ApiError, match="cannot change the entry"):
                table.put(KEYS[0], b"1", without)
            table.put(KEYS[0], b"1", record)
            assert consumer.reject(record)
            assert table.get(KEYS[0]) is None
            (again,) = await consumer.poll(5)
            table.put(KEYS[0], b"2", again)
            with pytest.raises(ApiError, match="does not count any more"):
                table.put(KEYS[0], b"1", record)
            assert consumer.done(again)
            await table.flush()
            assert await changelog_of(address, f"{topic}-counts") == {}
            assert consumer.done(without)
            await table.flush()
            assert await changelog_of(address, f"{topic}-counts") == {KEYS[0]: b"2"}
            with pytest.raises(ApiError, match="before it polls"):
                KeyedTable(consumer, "c", topic)

    asyncio.run(run())


def test_the_example_of_the_document_adds_up(address: str) -> None:
    example = next(each for each in python_examples("docs/cooperative.md", address) if "async def add" in each)
    expected = {b"account-%d" % key: b"%d" % sum(number % 7 for number in range(key, 60, 5)) for key in range(5)}
    with plain.Admin(address) as admin, plain.Producer(address) as producer:
        admin.create_topics("bookings", partitions=2)
        for number in range(60):
            producer.send("bookings", b"%d" % (number % 7), key=b"account-%d" % (number % 5))
    names: dict[str, Any] = {}

    def stop_in_the_end() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and ("totals" not in names or dict(names["totals"].items()) != expected):
            time.sleep(0.05)
        consumer = names["consumer"]
        consumer.driver._loop.call_soon_threadsafe(consumer.stop)

    watch = threading.Thread(target=stop_in_the_end)
    watch.start()
    exec(compile(example, "docs/cooperative.md", "exec"), names)
    watch.join()
    assert asyncio.run(changelog_of(address, "account-totals")) == expected


@pytest.mark.skipif(not THOROUGH, reason="a broker and four members of its own: make conformance")
def test_the_example_of_balances_ends_well(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "PYTHONWARNINGS": "ignore", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(BALANCES), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the balances are right" in done.stdout
    assert "Three members share two partitions: 2 partitions, 3 members" in done.stdout
    drawn = done.stdout.split("Three members share", 1)[1].split("Resized", 1)[0]
    assert {name for name in "abc" if name * 20 in drawn} == {"a", "b", "c"}, drawn  # None of them is idle.
    assert "At every moment" in done.stdout


def test_a_member_of_the_example_of_balances_keeps_them_and_finds_a_booking_that_is_missing(
    address: str, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = runpy.run_path(str(BALANCES))
    member, bank = names["member"], object.__new__(names["Bank"])
    member.__globals__.update(TOPIC=topic, CHANGELOG=f"{topic}-balances", GROUP=topic)
    bank.address, bank.expected = address, {account: {"bookings": 0, "sum": 0} for account in names["ACCOUNTS"]}
    said = ""

    async def run() -> None:
        nonlocal said
        async with Admin(address) as admin:
            await admin.create_topics(topic, partitions=2)
        ann = asyncio.create_task(member(address, "ann"))
        await bank.book(0.1)
        async with asyncio.timeout(60):
            while await bank.balances() != bank.expected:
                await asyncio.sleep(0.1)
            assert "WRONG" not in capsys.readouterr().out
            bank.expected[names["ACCOUNTS"][3]]["bookings"] += 1
            await bank.book(0.05)
            while "WRONG" not in said:
                said += capsys.readouterr().out
                await asyncio.sleep(0.05)
            signal.raise_signal(signal.SIGTERM)
            await ann

    asyncio.run(run())
    assert f"WRONG: booking 3 of b'{names['ACCOUNTS'][3]}'" in said
