"""What a shard decides in a thread, and what waits in line for it: the order, timers, failures, transactions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.outcome import Outcome, SetTimer
from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import File
from anabranch.server.coordinators.record_codec import RecordCodec
from anabranch.server.coordinators.replay import Held, Replay
from anabranch.server.coordinators.shard import ON_LOOP_MAX
from anabranch.server.coordinators.turns import STRETCH_MS, Turns
from tests.unit.server.coordinators.test_shard import Pair, Toy, World, decode, encode, play, refused_with, until

HEAVY = ON_LOOP_MAX + 1
LONG_S = 30.0


class Spent(Clock):
    """The time that work says it has taken."""

    spent_ms = 0

    def monotonic_ms(self) -> int:
        return self.spent_ms


class Apart:
    """A decision that is made in a thread, and lasts until it may end."""

    def __init__(self, key: str = "apart") -> None:
        self.key = key
        self.began, self.may_end = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []

    def decide(self, toy: Toy, now_ms: int) -> Outcome[str, Pair]:
        self.threads.append(threading.current_thread())
        self.began.set()
        assert self.may_end.wait(LONG_S)
        return toy.put(self.key, str(len(toy.values)))

    async def asked(self, world: World) -> Any:
        """The future of its reply, when it has begun."""
        reply = world.shard.ask(self.decide, lambda toy: HEAVY)
        await until(self.began.is_set)
        return reply


def in_line(world: World, story: Callable[[World, Apart, Any], Awaitable[None]]) -> None:
    """Tell a story that begins with a decision in a thread, and its reply."""

    async def told(world: World) -> None:
        apart = Apart()
        try:
            await story(world, apart, await apart.asked(world))
        finally:
            apart.may_end.set()

    play(world, told)


def test_a_large_decision_is_made_in_a_thread_and_what_comes_meanwhile_waits_in_its_order(tmp_path: Path) -> None:
    async def story(world: World, apart: Apart, reply: Any) -> None:
        put = world.shard.ask(lambda toy, now_ms: toy.put("after", str(len(toy.values))))
        world.shard.tell(lambda toy, now_ms: toy.put("told", str(len(toy.values))))
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not reply.done() and not put.done() and world.shard.machine.values == {}
        apart.may_end.set()
        assert await reply == "put apart" and apart.threads != [threading.main_thread()]
        assert await put == "put after"
        await until(lambda: not world.shard._turns.busy)
        assert list(world.shard.machine.values) == ["apart", "after", "told"]
        assert await world.reloaded() == {"apart": "0", "after": "1", "told": "2"}
        assert world.shard.ask(lambda toy, now_ms: Outcome("at once")) == "at once"

    in_line(World(tmp_path), story)


def test_the_reads_of_a_line_see_what_was_decided_before_them(tmp_path: Path) -> None:
    async def story(world: World, apart: Apart, reply: Any) -> None:
        seen = [world.shard.read(lambda toy, now_ms: dict(toy.values))]
        put = asyncio.ensure_future(world.put("after", "1"))
        await asyncio.sleep(0.01)
        seen.append(world.shard.read(lambda toy, now_ms: dict(toy.values)))
        apart.may_end.set()
        found = [await it for it in seen if isinstance(it, asyncio.Future)]
        assert found == [{"apart": "0"}, {"apart": "0", "after": "1"}]
        await asyncio.gather(reply, put)

    in_line(World(tmp_path), story)


def test_a_timer_that_waits_in_line_is_void_when_a_decision_before_it_has_set_it_anew(tmp_path: Path) -> None:
    async def story(world: World, apart: Apart, reply: Any) -> None:
        def prolonged(toy: Toy, now_ms: int) -> Outcome[None, Pair]:
            return Outcome(None, timers=(SetTimer("session", now_ms + 60_000),))

        for key in ("session", "other"):
            assert world.shard.ask(prolonged) is not None  # In line, before the timer rings.
            world.shard._on_timer(key)
        apart.may_end.set()
        await until(lambda: bool(world.shard.machine.woken))
        await reply
        assert world.shard.machine.woken == ["other"]

    in_line(World(tmp_path), story)


def test_a_machine_that_is_dropped_meanwhile_leaves_nothing_of_the_decision(tmp_path: Path) -> None:
    async def story(world: World, apart: Apart, reply: Any) -> None:
        put = asyncio.ensure_future(world.put("after", "1"))
        await asyncio.sleep(0)
        end = world.partition.log.end
        world.shard._fail("a test", OSError(0, "of failures"))
        apart.may_end.set()
        for waiting in (reply, put):
            with pytest.raises(ApiError) as error:
                await waiting
            assert refused_with(error) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert world.partition.log.end == end and await world.reloaded() == {}

    in_line(World(tmp_path), story)


def test_a_shard_that_is_loaded_again_meanwhile_takes_nothing_that_came_before(tmp_path: Path) -> None:
    async def story(world: World, apart: Apart, reply: Any) -> None:
        put = asyncio.ensure_future(world.put("after", "1"))
        await asyncio.sleep(0)
        world.shard._fail("a test", OSError(0, "of failures"))
        await world.shard.load()
        assert world.shard.active
        apart.may_end.set()
        for waiting in (reply, put):
            with pytest.raises(ApiError) as error:
                await waiting
            assert refused_with(error) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert world.shard.machine.values == {} and await world.put("later", "1") == "put later"

    in_line(World(tmp_path), story)


def test_a_request_whose_client_hangs_up_in_line_is_decided_all_the_same(tmp_path: Path) -> None:
    async def story(world: World, apart: Apart, reply: Any) -> None:
        put = asyncio.ensure_future(world.put("after", "1"))
        parked = asyncio.ensure_future(world.waiting("never"))
        await asyncio.sleep(0.01)
        put.cancel()
        parked.cancel()
        await asyncio.sleep(0.01)
        assert not put.done() and not parked.done(), "what they asked for is in memory still, and counts"
        apart.may_end.set()
        await reply
        await until(lambda: "after" in world.shard.machine.values and not world.shard._turns.busy)
        await asyncio.wait([put, parked])
        assert world.shard.parked == 0 and put.cancelled() and parked.cancelled()

    in_line(World(tmp_path), story)


def test_a_block_that_reads_the_machine_has_its_turn_and_one_that_is_cancelled_keeps_nobody(tmp_path: Path) -> None:
    """Claims of slices read while a thread changed what they went through, which ended the connection."""

    async def story(world: World, apart: Apart, reply: Any) -> None:
        seen: list[dict[str, str]] = []

        async def look() -> None:
            async with world.shard.undisturbed():
                seen.append(dict(world.shard.machine.values))

        cancelled, looks = asyncio.ensure_future(look()), asyncio.ensure_future(look())
        await asyncio.sleep(0.01)
        put = world.shard.ask(lambda toy, now_ms: toy.put("after", "1"))
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled() and not seen
        apart.may_end.set()
        await looks
        assert seen == [{"apart": "0"}], "all that came before, and nothing that came after"
        assert await put == "put after"
        await until(lambda: not world.shard._turns.busy)
        await look()
        assert seen[1] == {"apart": "0", "after": "1"}

    in_line(World(tmp_path), story)


def test_blocks_that_come_one_behind_the_other_have_their_turn_together(tmp_path: Path) -> None:
    """Each with a turn of its own kept the line from ever being empty."""

    async def story(world: World, apart: Apart, reply: Any) -> None:
        seen: list[str] = []

        async def look(name: str) -> None:
            async with world.shard.undisturbed():
                seen.append(name)

        turns = world.shard._turns
        looks = [asyncio.ensure_future(look(str(number))) for number in range(100)]
        await asyncio.sleep(0.01)
        length = len(turns)
        put = world.shard.ask(lambda toy, now_ms: seen.append("put") or toy.put("after", "1"))  # type: ignore[func-returns-value]
        looks += [asyncio.ensure_future(look("behind")) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert length == 1 and len(turns) == 3
        looks[50].cancel()
        apart.may_end.set()
        await asyncio.wait(looks)
        assert await put == "put after"
        assert seen == [*(str(number) for number in range(100) if number != 50), "put", *["behind"] * 3]
        await until(lambda: not turns.busy)

    in_line(World(tmp_path), story)


def test_blocks_that_are_cancelled_as_their_turn_comes_end_nothing(tmp_path: Path) -> None:
    async def story(world: World, apart: Apart, reply: Any) -> None:
        async def look() -> None:
            async with world.shard.undisturbed():
                pass

        first = asyncio.ensure_future(look())
        await asyncio.sleep(0.01)
        (blocks,) = [world.shard._turns._blocks]
        assert blocks is not None
        apart.may_end.set()
        blocks.begins[0].cancel()  # And its coroutine has not heard of it when the turn begins.
        await asyncio.wait([first])
        await reply
        await until(lambda: not world.shard._turns.busy)
        assert await world.put("later", "1") == "put later"

    in_line(World(tmp_path), story)


def test_a_decision_looks_in_its_turn_at_what_it_is_to_decide(tmp_path: Path) -> None:
    """What another member holds was looked at when a commit came, and claims before it in line took it then."""

    async def story(world: World, apart: Apart, reply: Any) -> None:
        held: list[str] = []
        seen: list[list[str]] = []

        def look() -> None:
            seen.append(list(held))

        async def claim() -> None:
            async with world.shard.undisturbed():
                held.append("slice")

        claims = asyncio.ensure_future(claim())
        await asyncio.sleep(0.01)
        put = world.shard.ask(lambda toy, now_ms: toy.put("commit", str(seen[-1])), None, look)
        apart.may_end.set()
        await asyncio.wait([claims])
        await put
        assert world.shard.machine.values["commit"] == "['slice']"

    in_line(World(tmp_path), story)


@pytest.mark.parametrize("weight", [0, HEAVY])
def test_a_decision_looks_once_at_what_it_is_to_decide_and_on_the_loop(weight: int, tmp_path: Path) -> None:
    """A large one looked as it came and again in its turn."""

    async def story(world: World) -> None:
        looks: list[threading.Thread] = []

        def decide(toy: Toy, now_ms: int) -> Outcome[str, Pair]:
            return toy.put("looks", str(len(looks)))

        reply = world.shard.ask(decide, lambda toy: weight, lambda: looks.append(threading.current_thread()))
        assert len(looks) == (weight == 0)
        await reply
        assert looks == [threading.main_thread()] and world.shard.machine.values["looks"] == "1"

    play(World(tmp_path), story)


def test_a_request_whose_client_hangs_up_as_its_turn_ends_is_not_parked_for_ever(tmp_path: Path) -> None:
    async def story(world: World, apart: Apart, reply: Any) -> None:
        def park(toy: Toy, now_ms: int) -> Outcome[Any, Pair]:
            asyncio.get_running_loop().call_soon(parked.cancel)  # Behind the turn, and before who waits for it.
            return toy.wait("never", 77)

        parked = world.shard.ask(park)
        apart.may_end.set()
        await reply
        await asyncio.wait([parked])
        assert parked.cancelled() and world.shard.parked == 0

    in_line(World(tmp_path), story)


def test_a_loop_ends_although_there_is_a_line(tmp_path: Path) -> None:
    world, apart = World(tmp_path), Apart()

    async def run() -> None:
        await world.shard.load()
        await apart.asked(world)
        world.shard.ask(lambda toy, now_ms: toy.put("after", "1"))
        threading.Timer(0.2, apart.may_end.set).start()

    async def ended() -> None:
        async with asyncio.timeout(5):
            await run()

    asyncio.run(ended())
    assert apart.may_end.is_set(), "the thread is awaited"


def test_shards_decide_apart_a_few_at_a_time_and_each_applies_before_the_next_decides(tmp_path: Path) -> None:
    room = asyncio.Semaphore(1)

    async def story(world: World, other: World) -> None:
        for each in (world, other):
            each.shard._room = room
        await other.shard.load()
        apart, later = Apart(), Apart()
        later.may_end.set()
        first = await apart.asked(world)
        second = other.shard.ask(later.decide, lambda toy: HEAVY)
        await asyncio.sleep(0.05)
        assert not later.began.is_set() and not second.done()
        apart.may_end.set()
        await until(later.began.is_set)
        assert list(world.shard.machine.values) == ["apart"]
        await asyncio.gather(first, second)
        await other.close()

    other = World(tmp_path / "other")
    play(World(tmp_path / "one"), lambda world: story(world, other))


def test_an_error_about_a_machine_that_was_dropped_meanwhile_does_not_stop_the_next_one(tmp_path: Path) -> None:
    began, may_end = threading.Event(), threading.Event()

    class Failing(Toy):
        def on_timer(self, key: Any, now_ms: int) -> Outcome[None, Pair]:
            began.set()
            assert may_end.wait(LONG_S)
            raise AssertionError("a bug")

    async def story(world: World) -> None:
        world.shard._make = Failing
        world.shard._codec = RecordCodec(encode, decode, timer_weight=lambda toy, key: HEAVY)
        await world.shard.load()
        world.shard._on_timer("session")
        await until(began.is_set)
        world.shard._fail("a test", OSError(0, "of failures"))
        await world.shard.load()
        assert world.shard.active
        may_end.set()
        await until(lambda: not world.shard._turns.busy)
        await asyncio.sleep(0)
        assert world.shard.active

    play(World(tmp_path), story)


def test_a_marker_is_not_said_to_be_written_when_the_shard_fails_before_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, may_sync = File.sync, threading.Event()

    def later(file: File) -> None:
        assert may_sync.wait(10)
        sync(file)

    async def story(world: World, apart: Apart, reply: Any) -> None:
        monkeypatch.setattr(File, "sync", later)

        def marked(toy: Toy, producer_id: int, now_ms: int) -> Outcome[None, Pair]:
            asyncio.get_running_loop().call_soon(world.shard._fail, "a test", OSError(0, "of failures"))
            return Outcome(None)

        world.shard._codec = RecordCodec(encode, decode, marked=marked)
        ended = asyncio.ensure_future(world.shard.end_transaction(7, 0, committed=True, coordinator_epoch=1))
        await asyncio.sleep(0)
        apart.may_end.set()
        try:
            with pytest.raises(ApiError) as error:
                await asyncio.wait_for(ended, 5)
        finally:
            may_sync.set()
        assert refused_with(error) is ErrorCode.COORDINATOR_NOT_AVAILABLE
        await asyncio.wait_for(asyncio.gather(reply, return_exceptions=True), 5)

    in_line(World(tmp_path), story)


def test_a_large_decision_that_raises_harms_nobody_in_line(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        def bug(toy: Toy, now_ms: int) -> Outcome[None, Pair]:
            raise AssertionError("a bug")

        wrong = world.shard.ask(bug, lambda toy: HEAVY)
        put = asyncio.ensure_future(world.put("after", "1"))
        with pytest.raises(AssertionError, match="a bug"):
            await wrong
        assert await put == "put after" and world.shard.active

    play(World(tmp_path), story)


def test_a_large_decision_of_a_timer_that_raises_reloads_the_shard(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.shard._codec = RecordCodec(encode, decode, timer_weight=lambda toy, key: HEAVY)
        world.shard._on_timer("sound")
        await until(lambda: "timer" in world.shard.machine.values)
        world.shard._on_timer("bug")
        await until(lambda: not world.shard.active)

    play(World(tmp_path), story)


def test_a_transaction_of_much_is_ended_in_a_thread_in_its_turn(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        threads = []

        class Watched(Toy):
            def apply_marker(self, producer_id: int, producer_epoch: int, committed: bool) -> None:
                threads.append(threading.current_thread())
                super().apply_marker(producer_id, producer_epoch, committed)

        world.shard._make = Watched
        world.shard._codec = RecordCodec(encode, decode, marker_weight=lambda toy, producer_id: HEAVY)
        await world.shard.load()
        await world.put("pending", "1", producer=(7, 0))
        ended = asyncio.ensure_future(world.shard.end_transaction(7, 0, committed=True, coordinator_epoch=1))
        await asyncio.sleep(0)
        after = await world.put("after", "2")
        await ended
        assert after == "put after" and threads and threading.main_thread() not in threads
        assert list(world.shard.machine.values.items()) == [("pending", "1"), ("after", "2")]
        assert await world.reloaded() == {"pending": "1", "after": "2"}

    play(World(tmp_path), story)


def test_what_open_transactions_hold_is_gathered_in_a_thread_when_the_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50,000 offsets of an open transaction took 29 ms of the loop, to be put in order."""
    threads: list[threading.Thread] = []
    held = Replay.held

    def noted(replay: Replay) -> list[Held]:
        threads.append(threading.current_thread())
        return held(replay)

    monkeypatch.setattr(Replay, "held", noted)

    async def story(world: World) -> None:
        await world.put("pending", "1", producer=(7, 0))
        threads.clear()
        other = world.another()
        await other.load()
        assert other.machine.pending == {7: {"pending": "1"}}
        assert threads and threading.main_thread() not in threads

    play(World(tmp_path), story)


def test_a_line_empties_although_more_comes_than_the_loop_has_iterations() -> None:
    """One piece of work in each iteration, beside others' work: the line of 600 small requests a second only grew."""

    async def story() -> None:
        turns, may_end = Turns("a shard", Spent()), asyncio.Event()
        iterations, lengths, running = 0, [], True

        async def small() -> None:
            pass

        def others() -> None:
            nonlocal iterations
            iterations += 1
            for _ in range(2):
                if turns.busy:
                    turns.take(small)
            lengths.append(len(turns))
            if running and turns.busy:
                asyncio.get_running_loop().call_soon(others)

        turns.take(may_end.wait)
        asyncio.get_running_loop().call_soon(others)
        while iterations < 100:
            await asyncio.sleep(0)
        may_end.set()
        for _ in range(20):
            await asyncio.sleep(0)
        running = False
        assert not turns.busy, lengths[-20:]

    asyncio.run(story())


def test_a_line_of_much_work_lets_others_have_their_turn() -> None:
    async def story() -> None:
        clock = Spent()
        turns = Turns("a shard", clock)
        done: list[int] = []

        async def piece(number: int) -> None:
            done.append(number)
            clock.spent_ms += 1

        for number in range(20):
            turns.take(lambda number=number: piece(number))  # type: ignore[misc]
        seen = []
        while turns.busy:
            await asyncio.sleep(0)
            seen.append(len(done))
        assert done == list(range(20))
        steps = [after - before for before, after in pairwise([0, *seen])]
        assert max(steps) <= STRETCH_MS, "ms of one step"

    asyncio.run(story())
