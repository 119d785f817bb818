"""What a consumer had of a topic that is another one now, or of a poll that raised: nothing of it is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client import Admin, AnabranchError, ApiError, Consumer, Producer, Record
from anabranch.client.consumer.commits import Commits
from anabranch.client.consumer.handout import Handout
from tests.support.broker import BrokerProcess

TOPIC, GROUP = "t", "g"
SOON: dict[str, Any] = {"auto_offset_reset": "earliest", "metadata_max_age_ms": 300}


def asked(broker: BrokerProcess, api: str) -> float:
    """How many requests of an API the broker has had."""
    return sum(value for name, value in broker.metrics().items() if "requests_total" in name and f'"{api}"' in name)


async def put(address: str, count: int, name: str, *, topic: str = TOPIC, size: int = 0) -> None:
    async with Producer(address) as producer:
        for number in range(count):
            await producer.send(topic, f"{name}-{number}".ljust(size, " "), key=f"{number}")
        await producer.flush()


async def make_again(address: str, count: int) -> None:
    async with Admin(address) as admin:
        await admin.delete_topics(TOPIC)
        await admin.create_topics(TOPIC, configs={"accept.range.fetch": "true"})
    if count:
        await put(address, count, "new")


async def make(address: str, count: int) -> None:
    async with Admin(address) as admin:
        await admin.create_topics(TOPIC, configs={"accept.range.fetch": "true"})
    await put(address, count, "old")


async def polled(consumer: Consumer, count: int, name: str = "") -> list[Record]:
    """Poll until so many records are there whose values begin with a name."""
    found: list[Record] = []
    async with asyncio.timeout(20):
        while sum(it.value.startswith(name.encode()) for it in found if it.value) < count:
            found += await consumer.poll(0.2)
    return [it for it in found if it.value and it.value.startswith(name.encode())]


async def read_by_the_next(address: str, count: int) -> list[Record]:
    """What the next consumer of the group is given, assigned by hand."""
    async with Consumer(address, group_id=GROUP, **SOON) as consumer:
        consumer.assign([(TOPIC, 0)])
        return await polled(consumer, count, "new")


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_a_position_that_cannot_be_found_is_looked_for_once_in_a_poll(broker: BrokerProcess, protocol: str) -> None:
    """The end of each look-up began the next one, thousands of times a second, also while nobody polled."""

    async def scenario() -> None:
        await make(broker.address, 1)
        settings: dict[str, Any] = {"group_protocol": protocol, "auto_offset_reset": "none"}
        async with Consumer(broker.address, group_id=GROUP, **settings) as consumer:
            consumer.subscribe(TOPIC)
            for _ in range(3):
                with pytest.raises(ApiError, match="OFFSET_OUT_OF_RANGE"):
                    await consumer.poll(10)
                before = asked(broker, "OffsetFetch")
                await asyncio.sleep(0.5)
                assert asked(broker, "OffsetFetch") - before < 5

    asyncio.run(scenario())


def test_a_position_that_cannot_be_found_is_the_error_of_who_asks_for_it(broker: BrokerProcess) -> None:
    """The error was kept for the next poll, and `position` waited for ever, also when the group had committed."""

    async def scenario() -> None:
        await make(broker.address, 10)
        settings: dict[str, Any] = {"auto_offset_reset": "none", "enable_auto_commit": False}
        async with (
            Consumer(broker.address, group_id=GROUP, **settings) as consumer,
            Consumer(broker.address, group_id=GROUP, **settings) as other,
        ):
            consumer.assign([(TOPIC, 0)])
            for _ in range(2):
                with pytest.raises(ApiError, match="OFFSET_OUT_OF_RANGE"):
                    await asyncio.wait_for(consumer.position(TOPIC, 0), 20)
            other.assign([(TOPIC, 0)])
            await other.commit({(TOPIC, 0): 5})
            assert await asyncio.wait_for(position_found(consumer), 20) == 5

    asyncio.run(scenario())


async def position_found(consumer: Consumer) -> int:
    """The position, once the error of a look-up before is told."""
    while True:
        try:
            return await consumer.position(TOPIC, 0)
        except ApiError:
            await asyncio.sleep(0.05)


def test_a_commit_that_is_refused_is_tried_again_at_its_time(broker: BrokerProcess) -> None:
    """So many finished ranges are committed before their time; a refusal gave them back, and they were due again."""

    async def scenario() -> None:
        await make(broker.address, 60)
        settings: dict[str, Any] = {"acknowledgement_mode": "explicit", "max_num_ranges_to_commit": 10}
        async with (
            Consumer(broker.address, group_id=GROUP, **settings, **SOON) as consumer,
            Consumer(broker.address, group_id=GROUP, **SOON) as member,
        ):
            consumer.assign([(TOPIC, 0)])
            found = await polled(consumer, 60)
            await consumer.poll(0.2)
            member.subscribe(TOPIC)
            await member.poll(2)  # Of a group with members only these may commit.
            for record in found[1::2]:
                consumer.done(record)
            before = asked(broker, "OffsetCommit")
            for _ in range(10):
                await consumer.poll(0.2)
            assert 1 <= asked(broker, "OffsetCommit") - before < 10

    asyncio.run(scenario())


def test_a_gate_does_not_wait_for_the_interval_of_commits_after_one_has_failed(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the gate of the other member waits for was not committed before ten minutes were over."""

    async def scenario() -> None:
        failures: list[int] = []
        send = Commits._send

        async def refused(self: Commits, *given: Any) -> Any:
            if not done:
                failures.append(1)
                raise ApiError(ErrorCode.INVALID_COMMIT_OFFSET_SIZE, "as if it were")
            return await send(self, *given)

        monkeypatch.setattr(Commits, "_send", refused)
        done: list[Record] = []
        found: list[Record] = []
        settings = SOON | {"auto_commit_interval_ms": 600_000}

        async def read(consumer: Consumer) -> None:
            while len(found) < 60:
                found.extend(await consumer.poll(0.2))

        async with (
            Admin(broker.address) as admin,
            Consumer(broker.address, group_id=GROUP, **settings) as one,
            Consumer(broker.address, group_id=GROUP, **settings) as other,
        ):
            await admin.create_topics(TOPIC, partitions=1)
            await put(broker.address, 30, "before")
            for consumer in (one, other):
                consumer.subscribe(TOPIC)
            reading = [asyncio.create_task(read(consumer)) for consumer in (one, other)]
            async with asyncio.timeout(60):
                while len(found) < 30 or not failures:
                    await asyncio.sleep(0.05)
                done += found
                await admin.resize(TOPIC, 2)
                await put(broker.address, 30, "after")
                await asyncio.gather(*reading)
            assert {it.partition for it in found} == {0, 1}

    asyncio.run(scenario())


@pytest.mark.parametrize("polls", ["all", "some"])
def test_what_is_done_of_slices_is_not_done_in_the_topic_that_is_created_again(
    broker: BrokerProcess, polls: str
) -> None:
    """It was committed by the topic's name, and new records were lost for the whole group."""

    async def scenario() -> None:
        await make(broker.address, 30)
        settings: dict[str, Any] = {"share": "any", "auto_commit_interval_ms": 60_000} | SOON
        async with Consumer(broker.address, group_id=GROUP, max_poll_records=5, **settings) as consumer:
            consumer.subscribe(TOPIC)
            await polled(consumer, 30 if polls == "all" else 10, "old")
            await make_again(broker.address, 30)
            assert len({it.value for it in await polled(consumer, 30, "new")}) == 30

    asyncio.run(scenario())


def test_what_is_done_of_slices_is_not_done_in_the_new_topic_where_its_commit_had_to_wait(
    broker: BrokerProcess,
) -> None:
    """Its slices were those of the deleted topic, and its id that of the new one."""

    async def scenario() -> None:
        await make(broker.address, 30)
        settings: dict[str, Any] = {"share": "any", "enable_auto_commit": False} | SOON
        async with Consumer(broker.address, group_id=GROUP, **settings) as consumer:
            consumer.subscribe(TOPIC)
            await polled(consumer, 30, "old")
            group = consumer._cooperative
            assert group is not None
            before = group.fetches.topic_ids[TOPIC]
            async with group._committing:  # As while an earlier commit is tried again.
                committing = asyncio.create_task(consumer.commit())
                await asyncio.sleep(0)
                await make_again(broker.address, 0)
                async with asyncio.timeout(20):
                    while group.fetches.topic_ids.get(TOPIC, before) == before:
                        await consumer.poll(0.2)
            with pytest.raises(ApiError) as refused:
                await committing
            assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_ID
            await put(broker.address, 30, "new")
            assert len({it.value for it in await polled(consumer, 30, "new")}) == 30

    asyncio.run(scenario())


def test_a_loop_that_goes_on_does_not_go_back_in_the_topic_that_is_created_again(broker: BrokerProcess) -> None:
    """Where it stood in the deleted topic was where the new one began."""

    async def scenario() -> None:
        await make(broker.address, 30)
        async with Consumer(broker.address, **SOON) as consumer:
            consumer.assign([(TOPIC, 0)])
            number = 0
            async for _ in consumer:
                number += 1
                if number == 8:
                    await make_again(broker.address, 30)
                    await asyncio.sleep(1.5)  # Of its work on the record; metadata is refreshed meanwhile.
                if number == 11:
                    break
            assert [it.offset for it in await polled(consumer, 30, "new")] == list(range(30))

    asyncio.run(scenario())


def test_what_is_finished_of_the_deleted_topic_is_not_committed_in_the_new_one(broker: BrokerProcess) -> None:
    """The ranges of the old records were: the group was given nothing of the new ones."""

    async def scenario() -> None:
        await make(broker.address, 12)
        settings: dict[str, Any] = {"acknowledgement_mode": "explicit", "auto_commit_interval_ms": 100} | SOON
        async with Consumer(broker.address, group_id=GROUP, **settings) as consumer:
            consumer.assign([(TOPIC, 0)])
            found = await polled(consumer, 12)
            await make_again(broker.address, 0)
            for _ in range(8):
                await consumer.poll(0.2)
            assert not any(consumer.done(it) for it in found[1:])
            for _ in range(3):
                await consumer.poll(0.2)
        await put(broker.address, 12, "new")
        assert len(await read_by_the_next(broker.address, 12)) == 12

    asyncio.run(scenario())


def test_a_commit_of_the_deleted_topic_does_not_count_in_the_new_one(broker: BrokerProcess) -> None:
    """It was tried again under the id that the name has now."""

    async def scenario() -> None:
        await make(broker.address, 30)
        async with Consumer(broker.address, group_id=GROUP, enable_auto_commit=False, **SOON) as consumer:
            consumer.assign([(TOPIC, 0)])
            await polled(consumer, 30)
            async with Admin(broker.address) as admin:
                await admin.delete_topics(TOPIC)
                committing = consumer.commit_async()
                await asyncio.sleep(0.2)
                await admin.create_topics(TOPIC)
            await put(broker.address, 60, "new")
            with pytest.raises(ApiError) as refused:
                await committing
            assert refused.value.code in (ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.UNKNOWN_TOPIC_ID)
        assert len(await read_by_the_next(broker.address, 60)) == 60

    asyncio.run(scenario())


async def two_topics(address: str, size: int = 0) -> None:
    async with Admin(address) as admin:
        await admin.create_topics(["a", "b"])
    for topic in ("a", "b"):
        await put(address, 20, topic, topic=topic, size=size)


async def two_topics_one_damaged(broker: BrokerProcess) -> None:
    await two_topics(broker.address)
    log = next(broker.data.glob("**/b-0/*.log"))
    damaged = bytearray(log.read_bytes())
    damaged[-3] ^= 0xFF
    log.write_bytes(damaged)


def test_a_poll_that_meets_a_damaged_batch_loses_no_records_of_others(broker: BrokerProcess) -> None:
    """Their positions had moved when it raised."""

    async def scenario() -> None:
        await two_topics_one_damaged(broker)
        found: list[Record] = []
        async with Consumer(broker.address, **SOON) as consumer:
            consumer.assign(["a", "b"])
            await asyncio.gather(consumer.position("a", 0), consumer.position("b", 0))
            await asyncio.sleep(1)  # Both are fetched.
            raised = 0
            async with asyncio.timeout(20):
                while len(found) < 20 or not raised:
                    try:
                        found += await consumer.poll(0.5)
                    except AnabranchError:
                        raised += 1
                        await asyncio.sleep(0.05)
        assert sorted(it.offset for it in found) == list(range(20)) and {it.topic for it in found} == {"a"}

    asyncio.run(scenario())


async def fetched(consumer: Consumer) -> None:
    """Assign both topics, and wait for the records of both."""
    consumer.assign(["a", "b"])
    await asyncio.gather(consumer.position("a", 0), consumer.position("b", 0))
    async with asyncio.timeout(20):
        while len(consumer._driver.deliverable()) < 2:
            await asyncio.sleep(0.05)


def hold_up_the_second(patched: pytest.MonkeyPatch) -> asyncio.Event:
    """Have the decoding of the second part never end; return what is set when it begins."""
    began = asyncio.Event()
    decoded: list[Any] = []
    table_beside = Handout.table_beside

    async def once(self: Handout, parts: Any, *given: Any) -> Any:
        if decoded:
            began.set()
            await asyncio.sleep(60)
        decoded.append(parts)
        return await table_beside(self, parts, *given)

    patched.setattr(Handout, "table_beside", once)
    return began


@pytest.mark.parametrize("commits", ["afterwards", "meanwhile"])
def test_a_poll_that_is_cancelled_loses_no_records(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, commits: str
) -> None:
    """One part was handed out when it was cancelled while the next one was decoded, and was committed as returned."""

    async def scenario() -> None:
        await two_topics(broker.address)
        async with Consumer(broker.address, group_id=GROUP, enable_auto_commit=False, **SOON) as consumer:
            await fetched(consumer)
            with monkeypatch.context() as patched:
                began = hold_up_the_second(patched)
                polling = asyncio.create_task(consumer.poll(10))
                await asyncio.wait_for(began.wait(), 20)
                assert sum(consumer._fetcher.positions().values()) == 20, "nothing was handed out before"
                if commits == "meanwhile":
                    await consumer.commit()
                polling.cancel()
                await asyncio.wait([polling])
            await consumer.commit()
            if commits == "afterwards":
                assert len({(it.topic, it.offset) for it in await polled(consumer, 40)}) == 40
        async with Consumer(broker.address, group_id=GROUP, **SOON) as following:
            following.assign(["a", "b"])
            assert len({(it.topic, it.offset) for it in await polled(following, 40)}) == 40

    asyncio.run(scenario())


def test_a_seek_counts_after_a_poll_that_was_cancelled(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next poll went back to what the cancelled one had not returned."""

    async def scenario() -> None:
        await two_topics(broker.address)
        async with Consumer(broker.address, group_id=GROUP, **SOON) as consumer:
            await fetched(consumer)
            with monkeypatch.context() as patched:
                began = hold_up_the_second(patched)
                polling = asyncio.create_task(consumer.poll(10))
                await asyncio.wait_for(began.wait(), 20)
                polling.cancel()
                await asyncio.wait([polling])
            for topic in ("a", "b"):
                await consumer.seek(topic, 0, 15)
            found = sorted((it.topic, it.offset) for it in await polled(consumer, 10))
            assert found == [(topic, offset) for topic in "ab" for offset in range(15, 20)]

    asyncio.run(scenario())


@pytest.mark.parametrize("moves", ["seeks", "assigns again"])
def test_a_new_position_counts_after_a_loop_that_was_left(broker: BrokerProcess, moves: str) -> None:
    """The next poll went back to the first record that the loop had not reached."""

    async def scenario() -> None:
        await make(broker.address, 30)
        async with Consumer(broker.address, **SOON) as consumer:
            consumer.assign([(TOPIC, 0)])
            async for record in consumer:
                if record.offset == 4:
                    break
            if moves == "seeks":
                await consumer.seek(TOPIC, 0, 20)
            else:
                consumer.assign([])
                consumer.assign([(TOPIC, 0)])
            first = 20 if moves == "seeks" else 0
            assert [it.offset for it in await polled(consumer, 30 - first)] == list(range(first, 30))

    asyncio.run(scenario())


@pytest.mark.parametrize("then", ["assigned no more", "passed over", "read"])
def test_a_damaged_batch_is_the_error_of_the_next_poll_while_it_is_the_next_to_be_read(
    broker: BrokerProcess, then: str
) -> None:
    async def scenario() -> None:
        await two_topics_one_damaged(broker)
        async with Consumer(broker.address, **SOON) as consumer:
            await fetched(consumer)
            assert len(await consumer.poll(10)) == 20
            if then == "assigned no more":
                consumer.assign(["a"])
            elif then == "passed over":
                await consumer.seek_to_end(("b", 0))
            if then == "read":
                with pytest.raises(AnabranchError):
                    await consumer.poll(0.2)
            else:
                assert await consumer.poll(0.2) == []

    asyncio.run(scenario())


def test_the_position_after_a_loop_that_was_left_is_that_of_the_record_it_did_not_reach(broker: BrokerProcess) -> None:
    """It was that behind all records which had been fetched for the loop: committed, they were lost."""

    async def scenario() -> None:
        await make(broker.address, 30)
        async with Consumer(broker.address, **SOON) as consumer:
            consumer.assign([(TOPIC, 0)])
            async for record in consumer:
                if record.offset == 4:
                    break
            assert await consumer.position(TOPIC, 0) == 5
            assert (await polled(consumer, 25))[0].offset == 5
            assert await consumer.position(TOPIC, 0) == 30

    asyncio.run(scenario())
