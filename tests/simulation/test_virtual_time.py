"""The event loop of the simulations: time, order, executors, processes that are killed, pipes, and its own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.simulation.virtual_time import (
    DeadlockError,
    KilledError,
    Pipe,
    StepLimitError,
    VirtualClock,
    VirtualSyncs,
    run,
    running_loop,
)


def test_time_jumps_to_the_next_timer_and_timers_of_one_moment_keep_their_order() -> None:
    async def main() -> None:
        loop, seen = running_loop(), list[str]()
        loop.call_later(3600, seen.append, "second")
        loop.call_later(3600, seen.append, "third")
        loop.call_later(60, seen.append, "first")
        loop.call_later(61, seen.append, "cancelled").cancel()
        await asyncio.sleep(86_400 * 3)
        assert seen == ["first", "second", "third"]
        assert loop.time() == 86_400 * 3
        clock = VirtualClock(loop, wall_ms=1_000)
        assert (clock.monotonic_ms(), clock.now_ms()) == (86_400_000 * 3, 86_400_000 * 3 + 1_000)

    run(main(), 0)


def test_what_asyncio_offers_works() -> None:
    async def main() -> str:
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        lock = asyncio.Lock()

        async def put() -> None:
            for number in range(3):
                async with lock:
                    await queue.put(number)

        async with asyncio.TaskGroup() as group:
            group.create_task(put())
            assert [await queue.get() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await queue.get()
        assert asyncio.get_running_loop().time() == 5
        inner = asyncio.create_task(asyncio.sleep(1, "kept"))
        outer = asyncio.ensure_future(asyncio.shield(inner))
        await asyncio.sleep(0)
        outer.cancel()
        return await inner

    assert run(main(), 0) == "kept"


def test_a_seed_gives_the_same_run_again_and_another_seed_another_one() -> None:
    async def main() -> list[tuple[float, int]]:
        loop, seen = asyncio.get_running_loop(), list[tuple[float, int]]()

        async def work(number: int) -> None:
            await loop.run_in_executor(None, seen.append, (loop.time(), number))
            seen.append((loop.time(), number))

        tasks = {asyncio.create_task(work(number)) for number in range(20)}
        for task in tasks:
            await task
        return seen

    assert run(main(), 1) == run(main(), 1) != run(main(), 2)


def test_a_function_in_an_executor_runs_later_and_one_worker_keeps_the_order() -> None:
    async def main() -> None:
        loop, seen = asyncio.get_running_loop(), list[int]()
        with ThreadPoolExecutor(1) as one:
            futures = [loop.run_in_executor(one, seen.append, number) for number in range(50)]
            assert not seen
            for number, future in enumerate(futures):
                await future
                assert seen[: number + 1] == list(range(number + 1))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run(main(), 3)


def test_waiting_for_nothing_is_found_out() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.sleep(1)
        await asyncio.create_task(wait_for_nothing(), name="the one that waits")

    with pytest.raises(DeadlockError, match=r"the one that waits.*at test_virtual_time.py:\d+"):
        run(main(), 0)


def test_going_in_a_circle_is_found_out() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(StepLimitError, match="more than 500 steps"):
        run(main(), 0, steps_max=500)


def test_an_error_in_a_callback_ends_the_simulation() -> None:
    def fail() -> None:
        raise AssertionError("a rule is broken")

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, fail)
        await asyncio.sleep(10)

    with pytest.raises(AssertionError, match="a rule is broken"):
        run(main(), 0)


def count_up(seen: list[str]) -> Coroutine[Any, Any, None]:
    async def count() -> None:
        try:
            asyncio.get_running_loop().call_later(2.5, seen.append, "timer")
            for number in range(5):
                seen.append(str(number))
                await asyncio.sleep(1)
        finally:
            seen.append("finally")

    return count()


def test_of_a_killed_process_nothing_runs_on() -> None:
    seen: list[str] = []

    async def main() -> None:
        process = running_loop().process("a")
        task = asyncio.create_task(process.perform(count_up(seen)))
        await asyncio.sleep(1.5)
        process.kill()
        with pytest.raises(KilledError):
            await task
        await asyncio.sleep(100)
        assert seen == ["0", "1"]
        with pytest.raises(KilledError):
            await process.perform(count_up(seen))
        other = running_loop().process("b")
        await other.perform(count_up(seen))
        assert seen[2:] == ["0", "1", "2", "timer", "3", "4", "finally"]
        seen.clear()

    run(main(), 0)
    assert "finally" in seen, "its tasks are cancelled when the simulation ends"


def test_a_process_can_be_killed_before_each_of_its_steps() -> None:
    async def main(steps: int) -> tuple[bool, int]:
        process, seen = running_loop().process("a"), list[str]()
        process.kill_in(steps)
        try:
            await process.perform(count_up(seen))
        except KilledError:
            return True, len(seen)
        return False, len(seen)

    ends = [run(main(steps), 0) for steps in range(20)]
    lengths = [length for _, length in ends]
    assert lengths == sorted(lengths)
    assert set(lengths) == {0, 1, 2, 3, 4, 5, 6, 7}
    assert [killed for killed, _ in ends] == sorted((killed for killed, _ in ends), reverse=True)


def test_syncs_are_done_later_and_tell_their_error() -> None:
    async def main() -> None:
        loop, told = running_loop(), list[OSError | None]()
        syncs = VirtualSyncs(loop)

        def fail() -> None:
            raise OSError(5, "refused")

        syncs.sync((), told.append)
        syncs.run(fail, told.append)
        assert not told
        await asyncio.sleep(1)
        assert [None if error is None else error.errno for error in told] in ([None, 5], [5, None])

    run(main(), 0)


def test_a_pipe_keeps_the_order_and_loses_the_end_of_what_is_on_its_way_when_it_breaks() -> None:
    async def main(lose: int | None) -> list[int]:
        loop, seen = running_loop(), list[int]()
        receiver = loop.process("receiver")
        pipe = Pipe(loop, seen.append, delay_s=lambda: loop.chance.uniform(0, 1), receiver=receiver)
        for number in range(10):
            pipe.send(number)
        await asyncio.sleep(0.5)
        assert pipe.in_flight == 10 - len(seen) > 2
        pipe.close(lose=lose)
        pipe.send(99)
        await asyncio.sleep(10)
        return seen

    assert run(main(2), 1) == list(range(8))
    assert 0 <= len(run(main(None), 1)) < 8


def test_a_stalled_pipe_delivers_everything_in_the_end_but_not_to_the_dead() -> None:
    async def main() -> None:
        loop, seen = running_loop(), list[int]()
        receiver = loop.process("receiver")
        pipe = Pipe(loop, seen.append, delay_s=lambda: 0.001, receiver=receiver)
        pipe.stall(30)
        pipe.send(1)
        await asyncio.sleep(29)
        assert not seen
        await asyncio.sleep(2)
        pipe.send(2)
        receiver.kill()
        await asyncio.sleep(1)
        assert seen == [1]

    run(main(), 0)
