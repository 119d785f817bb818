"""A coordinator shard with a small machine on a real log: order, durability, parking, timers, failures, loading."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.codec import EncodeError
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.outcome import CancelTimer, Outcome, Parked, ParkedReply, SetTimer
from anabranch.records.batch import end_transaction_marker, parse_header
from anabranch.records.key_values import encode_pairs
from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import Disk
from anabranch.runtime.metrics import Counter
from anabranch.server.coordinators import follow_ups
from anabranch.server.coordinators import shard as shards
from anabranch.server.coordinators.record_codec import RecordCodec
from anabranch.server.coordinators.shard import Shard
from anabranch.server.coordinators.shard_state import ShardState
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.log import cleaner, replacing
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog
from tests.support.disks import FaultyDisk

Pair = tuple[str, str | None]
NAME = TopicPartition("__toy", 0)


class Toy:
    """A dictionary whose keys can be waited for."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.pending: dict[int, dict[str, str | None]] = {}
        self.waiting: dict[str, list[int]] = {}
        self.woken: list[Any] = []
        self.loaded_at: int | None = None

    def apply(self, record: Pair, *, producer_id: int = -1) -> None:
        key, value = record
        if value == "unappliable":
            raise AssertionError(value)
        if producer_id >= 0:
            self.pending.setdefault(producer_id, {})[key] = value
            return
        for held in self.pending.values():
            held.pop(key, None)
        self.values.pop(key, None)
        if value is not None:
            self.values[key] = value

    def apply_marker(self, producer_id: int, producer_epoch: int, committed: bool) -> None:
        held = self.pending.pop(producer_id, {})
        for key, value in held.items() if committed else ():
            self.apply((key, value))

    def loaded(self, now_ms: int) -> Outcome[None, Pair]:
        self.loaded_at = now_ms
        return Outcome(reply=None)

    def on_timer(self, key: Any, now_ms: int) -> Outcome[None, Pair]:
        self.woken.append(key)
        if key == "bug":
            raise AssertionError("a bug")
        return Outcome(reply=None, records=(("timer", str(key)),))

    def put(self, key: str, value: str | None, *, producer: tuple[int, int] | None = None) -> Outcome[str, Pair]:
        answers = tuple(ParkedReply(ticket, value) for ticket in self.waiting.pop(key, ()))
        return Outcome(reply=f"put {key}", records=((key, value),), answers=answers, producer=producer)

    def wait(self, key: str, ticket: int) -> Outcome[Any, Pair]:
        if key in self.values:
            return Outcome(reply=self.values[key])
        self.waiting.setdefault(key, []).append(ticket)
        return Outcome(reply=Parked(ticket))


def encode(record: Pair) -> tuple[bytes, bytes | None]:
    key, value = record
    return key.encode(), None if value is None else value.encode()


def decode(key: bytes, value: bytes | None) -> Pair | None:
    return None if key.startswith(b"unknown") else (key.decode(), None if value is None else value.decode())


class World:
    """A shard, its partition and its disk."""

    def __init__(self, path: Path, durability: str = "fsync", disk: Disk | None = None) -> None:
        self.disk = disk or Disk()
        settings = topic_settings({"cleanup.policy": "compact", "segment.bytes": "1000"}, NOT_SET, durability)
        log = LocalLog.open(path / "__toy-0", settings.log, disk=self.disk)
        count = Counter()
        self.partition = Partition(NAME, NO_TOPIC_ID, log, settings, bytes_in=count, bytes_out=count, messages_in=count)
        self.partition.leadership = Leadership(NO_TOPIC_ID, 0, 0, 0, 1, 1, retiring=False)
        self.partition.rebuild_table(0)
        self.commits = GroupCommit()
        self.tickets = 0
        self.shard: Shard[Toy, Pair] = self.another()

    def another(self) -> Shard[Toy, Pair]:
        """A shard that has loaded nothing."""
        return Shard(
            self.partition,
            Toy,
            RecordCodec(encode, decode),
            commit=lambda partition: self.commits.commit(partition.log, partition.high_watermark_moved),
            clock=Clock(),
        )

    async def put(self, key: str, value: str | None, **options: Any) -> str:
        return await self.shard.submit(lambda toy, now_ms: toy.put(key, value, **options))

    async def waiting(self, key: str) -> str:
        self.tickets += 1
        ticket = self.tickets
        return await self.shard.submit(lambda toy, now_ms: toy.wait(key, ticket))

    async def reloaded(self) -> dict[str, str]:
        """What another shard finds in the same log."""
        other = self.another()
        await other.load()
        return other.machine.values

    async def close(self) -> None:
        self.shard.unload()
        await self.commits.drain()
        self.commits.close()


def test_a_timer_of_which_a_later_order_is_still_to_be_carried_out_does_not_ring(tmp_path: Path) -> None:
    many = follow_ups.AT_A_TIME + 1

    async def story(world: World) -> None:
        await world.shard.load()
        last = many - 1

        async def order(in_ms: int) -> None:
            def decide(toy: Toy, now_ms: int) -> Outcome[None, Pair]:
                return Outcome(None, timers=tuple(SetTimer(number, now_ms + in_ms) for number in range(many)))

            await world.shard.submit(decide)

        await order(60_000)
        assert world.shard._follow_ups.holds(last)
        world.shard._on_timer(last)
        world.shard._on_timer("free")
        assert world.shard.machine.woken == ["free"]
        await asyncio.sleep(0)
        world.shard._on_timer(last)
        assert world.shard.machine.woken == ["free", last]

    play(World(tmp_path), story)


def play(world: World, story: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        await world.shard.load()
        await story(world)
        await world.close()

    asyncio.run(run())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture(params=["fsync", "os"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(tmp_path, request.param)


def refused_with(error: pytest.ExceptionInfo[ApiError]) -> ErrorCode:
    return error.value.code


def test_what_was_put_is_applied_in_the_log_and_found_again(world: World) -> None:
    async def story(world: World) -> None:
        assert await world.put("a", "1") == "put a"
        await world.put("b", "2")
        await world.put("a", None)
        await world.put("unknown", "kept in the log, and skipped")
        assert world.partition.log.flushed in (0, 4)
        assert await world.reloaded() == {"b": "2"}

    play(world, story)


def test_a_reply_is_given_after_its_records_are_durable(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        put = world.shard.ask(lambda toy, now_ms: toy.put("a", "1"))
        assert isinstance(put, asyncio.Future) and not put.done()
        assert world.shard.machine.values == {"a": "1"}
        assert world.partition.log.flushed == 0
        await put
        assert world.partition.log.flushed == 1

    play(World(tmp_path), story)


def test_a_reply_without_records_waits_for_the_records_that_it_was_decided_upon(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.shard.ask(lambda toy, now_ms: toy.put("a", "1"))
        seen = world.shard.read(lambda toy, now_ms: toy.values["a"])
        assert isinstance(seen, asyncio.Future)
        assert await seen == "1"
        assert world.partition.log.flushed == 1
        assert world.shard.read(lambda toy, now_ms: toy.values["a"]) == "1"

    play(World(tmp_path), story)


def test_many_at_once_share_their_syncs(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await asyncio.gather(*(world.put(str(number), "x") for number in range(200)))
        assert world.commits.syncs <= 3

    play(World(tmp_path), story)


def test_a_parked_request_is_answered_by_a_later_outcome(world: World) -> None:
    async def story(world: World) -> None:
        waiting = [asyncio.ensure_future(world.waiting("a")) for _ in range(3)]
        await until(lambda: world.shard.parked == 3)
        await world.put("a", "1")
        assert await asyncio.gather(*waiting) == ["1"] * 3
        assert world.shard.parked == 0
        assert await world.waiting("a") == "1"

    play(world, story)


def test_the_ticket_of_a_closed_connection_is_dropped(world: World) -> None:
    async def story(world: World) -> None:
        gone, stays = asyncio.ensure_future(world.waiting("a")), asyncio.ensure_future(world.waiting("a"))
        await until(lambda: world.shard.parked == 2)
        gone.cancel()
        await until(lambda: world.shard.parked == 1)
        await world.put("a", "1")
        assert await stays == "1"

    play(world, story)


def test_timers_wake_the_machine_and_what_it_decides_is_persisted(world: World) -> None:
    async def story(world: World) -> None:
        def set_timers(toy: Toy, now_ms: int) -> Outcome[None, Pair]:
            times = {"soon": 20, "never": 30, "moved": 10}
            timers = [SetTimer(key, now_ms + delay) for key, delay in times.items()]
            return Outcome(reply=None, timers=(*timers, CancelTimer("never"), SetTimer("moved", now_ms + 60)))

        await world.shard.submit(set_timers)
        await until(lambda: len(world.shard.machine.woken) == 2)
        assert world.shard.machine.woken == ["soon", "moved"]
        assert await world.reloaded() == {"timer": "moved"}

    play(world, story)


def test_a_timer_may_be_set_to_an_earlier_time(world: World) -> None:
    async def story(world: World) -> None:
        def at(delay_ms: int) -> Callable[[Toy, int], Outcome[None, Pair]]:
            return lambda toy, now_ms: Outcome(reply=None, timers=(SetTimer("t", now_ms + delay_ms),))

        await world.shard.submit(at(100_000))
        await world.shard.submit(at(1))
        await until(lambda: world.shard.machine.woken == ["t"])

    play(world, story)


def test_a_full_disk_refuses_and_the_shard_comes_back_with_what_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "RELOAD_DELAY_MS", 10)
    disk = FaultyDisk(1)
    disk.make_directory(tmp_path)

    async def story(world: World) -> None:
        await world.put("a", "1")
        parked = asyncio.ensure_future(world.waiting("b"))
        await until(lambda: world.shard.parked == 1)
        disk.capacity = disk.used
        with pytest.raises(ApiError) as error:
            await world.put("a", "2")
        assert refused_with(error) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        with pytest.raises(ApiError) as error:
            await parked
        assert refused_with(error) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert world.shard.state is not ShardState.ACTIVE
        disk.capacity = None
        await until(lambda: world.shard.active)
        assert world.shard.machine.values == {"a": "1"}
        await world.put("a", "3")
        assert await world.reloaded() == {"a": "3"}

    play(World(tmp_path, disk=disk), story)


def test_a_failed_sync_undoes_what_was_applied_and_nobody_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "RELOAD_DELAY_MS", 10)
    disk = FaultyDisk(2)
    disk.make_directory(tmp_path)

    async def story(world: World) -> None:
        await world.put("a", "1")
        disk.fail_sync = True
        put, seen = asyncio.ensure_future(world.put("a", "2")), asyncio.ensure_future(world.waiting("a"))
        outcomes = await asyncio.gather(put, seen, return_exceptions=True)
        assert [getattr(it, "code", it) for it in outcomes] == [ErrorCode.COORDINATOR_NOT_AVAILABLE] * 2
        disk.fail_sync = False
        await until(lambda: world.shard.active)
        assert world.shard.machine.values == {"a": "1"}

    play(World(tmp_path, disk=disk), story)


def test_a_log_that_lost_records_takes_the_machine_back_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "RELOAD_DELAY_MS", 10)
    disk = FaultyDisk(3)
    disk.make_directory(tmp_path)

    async def story(world: World) -> None:
        await world.put("a", "1")
        world.partition.log.flush()
        await world.put("a", "2")
        disk.fail_sync = True
        with pytest.raises(OSError):
            world.partition.log.flush()
        disk.fail_sync = False
        (path,) = [path for path in disk.nodes if path.suffix == ".log"]
        disk.flip_bit(path, len(disk.nodes[path].data) - 2)
        with pytest.raises(ApiError) as error:
            await world.put("b", "1")
        assert refused_with(error) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        await until(lambda: world.shard.active)
        assert world.shard.machine.values == {"a": "1"}
        await world.put("b", "2")
        assert await world.reloaded() == {"a": "1", "b": "2"}

    play(World(tmp_path, "os", disk), story)


def test_a_machine_that_cannot_apply_is_loaded_again_after_longer_and_longer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "RELOAD_DELAY_MS", 1)

    async def story(world: World) -> None:
        await world.put("a", "1")
        with pytest.raises(AssertionError):
            await world.put("b", "unappliable")
        await until(lambda: world.shard._failures >= 3)
        with pytest.raises(ApiError) as error:
            await world.put("a", "2")
        assert refused_with(error) in (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)

    play(world, story)


def test_a_timer_that_cannot_be_decided_upon_reloads_the_shard(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "RELOAD_DELAY_MS", 1)

    async def story(world: World) -> None:
        await world.put("a", "1")
        before = world.shard.machine
        await world.shard.submit(lambda toy, now_ms: Outcome(reply=None, timers=(SetTimer("bug", now_ms),)))
        await until(lambda: world.shard.active and world.shard.machine is not before)
        assert world.shard.machine.values == {"a": "1"}

    play(world, story)


@pytest.mark.parametrize("weight", [0, shards.ON_LOOP_MAX + 1])
def test_a_timer_whose_records_cannot_be_written_rings_again_and_concerns_nobody_else(
    world: World, weight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the loop, or in a thread."""
    monkeypatch.setattr(shards, "RING_AGAIN_MS", 20)

    def refused(record: Pair) -> tuple[bytes, bytes | None]:
        if record == ("timer", "one group's"):
            raise EncodeError("ours")
        return encode(record)

    async def story(world: World) -> None:
        world.shard._codec = RecordCodec(refused, decode, timer_weight=lambda toy, key: weight)
        await world.put("a", "1")
        before = world.shard.machine
        await world.shard.submit(lambda toy, now_ms: Outcome(reply=None, timers=(SetTimer("one group's", now_ms),)))
        await until(lambda: len(world.shard.machine.woken) >= 3)
        await world.shard.submit(lambda toy, now_ms: Outcome(reply=None, timers=(SetTimer("another's", now_ms),)))
        await until(lambda: "timer" in world.shard.machine.values)
        assert world.shard.machine is before
        assert before.values == {"a": "1", "timer": "another's"} == await world.reloaded()

    play(world, story)


def test_a_decision_that_raises_changes_nothing_for_the_others(world: World) -> None:
    async def story(world: World) -> None:
        with pytest.raises(ZeroDivisionError):
            await world.shard.submit(lambda toy, now_ms: Outcome(reply=1 // 0))
        assert await world.put("a", "1") == "put a"

    play(world, story)


def test_before_it_is_loaded_and_after_it_is_unloaded_it_says_so(world: World) -> None:
    async def story(world: World) -> None:
        fresh = world.another()
        with pytest.raises(ApiError) as error:
            await fresh.submit(lambda toy, now_ms: toy.put("a", "1"))
        assert refused_with(error) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        parked = asyncio.ensure_future(world.waiting("a"))
        await until(lambda: world.shard.parked == 1)
        put = asyncio.ensure_future(world.put("b", "1"))
        await asyncio.sleep(0)
        world.shard.unload()
        with pytest.raises(ApiError) as error:
            await parked
        assert refused_with(error) is ErrorCode.NOT_COORDINATOR
        assert await put == "put b"
        with pytest.raises(ApiError) as error:
            await world.put("b", "2")
        assert refused_with(error) is ErrorCode.NOT_COORDINATOR

    play(world, story)


def test_records_of_a_transaction_count_from_its_marker_on(world: World) -> None:
    async def story(world: World) -> None:
        await world.put("a", "1")
        await world.put("a", "2", producer=(7, 0))
        await world.put("b", "2", producer=(8, 0))
        await world.put("c", "2", producer=(9, 0))
        assert world.shard.machine.values == await world.reloaded() == {"a": "1"}
        await world.shard.end_transaction(7, 0, committed=True, coordinator_epoch=0)
        await world.shard.end_transaction(8, 0, committed=False, coordinator_epoch=0)
        assert world.shard.machine.values == await world.reloaded() == {"a": "2"}
        other = world.another()
        await other.load()
        assert other.machine.pending == world.shard.machine.pending == {9: {"c": "2"}}

    play(world, story)


def test_only_a_producer_with_records_in_the_log_gets_a_marker_and_those_in_line_before_it_count(world: World) -> None:
    async def story(world: World) -> None:
        await world.shard.end_transaction(7, 0, committed=True, coordinator_epoch=0)
        assert world.partition.log.end == 0
        assert len(world.partition.table) == 0
        waiting = world.shard.ask(lambda toy, now_ms: toy.put("a", "1", producer=(7, 0)), lambda toy: 10**6)
        await world.shard.end_transaction(7, 0, committed=True, coordinator_epoch=0)
        assert await waiting == "put a"
        assert world.shard.machine.values == await world.reloaded() == {"a": "1"}

    play(world, story)


def test_of_two_transactions_the_later_record_wins_whichever_is_committed_last(world: World) -> None:
    async def story(world: World) -> None:
        append(world, [(b"a", b"1"), (b"b", b"1")], producer_id=7)
        append(world, [(b"a", b"2")], producer_id=8)
        append(world, [(b"b", b"plain")])
        mark(world, 8, commit=True)
        mark(world, 7, commit=True)
        assert await world.reloaded() == {"a": "2", "b": "plain"}

    play(world, story)


def test_a_log_means_the_same_before_during_and_after_its_compaction(world: World) -> None:
    async def story(world: World) -> None:
        for number in range(200):
            await world.put(f"key {number % 7}", str(number) if number % 5 else None)
        expected = dict(world.shard.machine.values)
        log = world.partition.log
        log.flush()
        log.checkpoint()
        loading = world.another()
        task = asyncio.ensure_future(loading.load())
        await asyncio.sleep(0)
        member = cleaner.Member(log)
        assert cleaner.is_due(member, Clock().now_ms() + 1_000)
        (cleaned,) = cleaner.plan(member, Clock().now_ms() + 1_000).run()
        assert replacing.finish(log, cleaned) > 0
        await task
        assert loading.machine.values == expected == await world.reloaded()
        await world.put("key 1", "new")
        assert await world.reloaded() == {**expected, "key 1": "new"}

    play(world, story)


def append(world: World, pairs: list[tuple[bytes | None, bytes | None]], producer_id: int = -1) -> None:
    batch = encode_pairs(pairs, 1_000, producer_id=producer_id, producer_epoch=0 if producer_id >= 0 else -1)
    world.partition.append(batch, parse_header(batch), 1_000)


def mark(world: World, producer_id: int, *, commit: bool) -> None:
    marker = end_transaction_marker(producer_id, 0, commit=commit, coordinator_epoch=0, timestamp_ms=1_000)
    world.partition.append(marker, parse_header(marker), 1_000)


def test_the_error_of_a_sync_from_before_the_shard_failed_is_not_left_to_asyncio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[dict[str, Any]] = []

    async def story(world: World) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        syncs: list[asyncio.Future[None]] = []

        def commit(_: Partition) -> asyncio.Future[None]:
            syncs.append(asyncio.get_running_loop().create_future())
            return syncs[-1]

        monkeypatch.setattr(world.shard._durable, "_commit", commit)
        first = asyncio.ensure_future(world.put("a", "1"))
        await until(lambda: bool(syncs))
        with monkeypatch.context() as broken:
            broken.setattr(Partition, "append", mock.Mock(side_effect=OSError(5, "the disk does not write")))
            with pytest.raises(ApiError):
                await world.put("b", "2")
        with pytest.raises(ApiError):
            await first
        syncs.pop().set_exception(OSError(5, "the disk does not write"))
        await asyncio.sleep(0)
        gc.collect()

    play(World(tmp_path), story)
    assert reported == []
