"""Work in threads ends with its caller, or before it."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from anabranch.runtime.thread_work import to_the_end


def test_what_a_thread_finds_or_raises_is_the_callers() -> None:
    async def scenario() -> None:
        with ThreadPoolExecutor(1) as thread:
            assert await to_the_end(thread, divmod, 7, 2) == (3, 1)
            with pytest.raises(ZeroDivisionError):
                await to_the_end(thread, divmod, 7, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("cancellations", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_caller_waits_for_work_that_has_begun(cancellations: int, fails: bool) -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert goes_on.wait(20)
        ended.set()
        if fails:
            raise ValueError("nobody hears of it")

    async def scenario() -> None:
        said: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: said.append(context))
        with ThreadPoolExecutor(1) as thread:
            task = loop.create_task(to_the_end(thread, work))
            await loop.run_in_executor(None, begun.wait, 20)
            for _ in range(cancellations):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done()
            goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended.is_set()
        del task
        await asyncio.sleep(0.01)  # The loop lets go of it.
        gc.collect()
        assert not said

    asyncio.run(scenario())


def test_work_of_a_cancelled_caller_that_has_not_begun_never_does() -> None:
    goes_on = threading.Event()
    done: list[int] = []

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(goes_on.wait, 20)
            task = asyncio.create_task(to_the_end(thread, done.append, 1))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
            assert not first.done()
            goes_on.set()
        assert not done

    asyncio.run(scenario())


def test_a_thread_that_ends_ends_what_waits_for_it() -> None:
    goes_on = threading.Event()

    async def scenario() -> None:
        thread = ThreadPoolExecutor(1)
        thread.submit(goes_on.wait, 20)
        task = asyncio.create_task(to_the_end(thread, int))
        await asyncio.sleep(0)
        thread.shutdown(wait=False, cancel_futures=True)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        goes_on.set()

    asyncio.run(scenario())


def test_work_that_has_begun_is_told_that_it_is_in_vain() -> None:
    begun, given_up = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return given_up.wait(20)

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as thread:
            task = asyncio.create_task(to_the_end(thread, work, give_up=given_up.set))
            await asyncio.get_running_loop().run_in_executor(None, begun.wait, 20)
            assert not given_up.is_set()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
            assert given_up.is_set()

    asyncio.run(scenario())
