"""The times of the loop's steps, with clocks that the steps turn themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from anabranch.runtime import loop_steps
from anabranch.runtime.loop_steps import LoopSteps, timed
from anabranch.runtime.metrics import Metrics


class Clocks:
    """Time that passes, and the processor's, as far as steps say so."""

    def __init__(self) -> None:
        self.now = self.used = 100.0
        self.read = 0
        self.metrics = Metrics()
        self.steps = LoopSteps(self.metrics, clock=lambda: self.now, processor=self._processor)

    def _processor(self) -> float:
        self.read += 1
        return self.used

    def work(self, seconds: float, processor: float | None = None) -> None:
        self.now += seconds
        self.used += seconds if processor is None else processor

    def run(self, main: Callable[[], object]) -> None:
        async def installed() -> None:
            with self.steps.installed(asyncio.get_running_loop()):
                await main()  # type: ignore[misc]

        asyncio.run(installed())

    def slow(self) -> dict[str, float]:
        """The slow steps counted, by work."""
        families = asyncio.run(self.metrics.families())
        found = [family for family in families if family.name == "anabranch_loop_slow_steps_total"]
        return {labels["work"]: value for family in found for labels, value in family.samples}  # type: ignore[misc]


def test_each_step_of_a_task_is_timed_and_the_longest_kept() -> None:
    clocks = Clocks()

    async def working() -> str:
        for seconds in (0.002, 0.004, 0.003):
            clocks.work(seconds)
            await asyncio.sleep(0)
        return "done"

    async def main() -> None:
        assert await asyncio.create_task(working()) == "done"

    clocks.run(main)
    assert clocks.steps.longest.seconds == pytest.approx(0.004)
    assert clocks.slow() == {}


def test_a_slow_step_is_counted_and_logged_under_the_name_of_its_work(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()

    async def fetching() -> None:
        clocks.work(0.020, processor=0.004)

    async def background() -> None:
        clocks.work(0.030)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_task(clocks.steps.named("Fetch", fetching()))
        await loop.create_task(background())

    with caplog.at_level(logging.WARNING):
        clocks.run(main)
    background_name = next(name for name in clocks.slow() if name != "Fetch")
    assert background_name.endswith("background")
    assert clocks.slow() == {"Fetch": 1, background_name: 1}
    assert clocks.steps.longest == (pytest.approx(0.030), background_name)
    (line,) = caplog.records  # The second is suppressed.
    fields = line.anabranch_fields  # type: ignore[attr-defined]
    assert fields == {"work": "Fetch", "ms": 20.0, "processor_ms": 4.0, "suppressed": 0}


def test_a_step_that_waits_for_others_has_taken_long_but_not_of_the_processor() -> None:
    clocks = Clocks()

    async def main() -> None:
        async def waiting() -> None:
            clocks.work(0.500, processor=0.001)

        async def working() -> None:
            clocks.work(0.009)

        await asyncio.create_task(waiting())
        await asyncio.create_task(working())

    clocks.run(main)
    assert clocks.steps.longest.seconds == pytest.approx(0.500)
    assert clocks.steps.longest_processor.seconds == pytest.approx(0.009)


def test_a_callback_belongs_to_its_work_or_to_what_it_names() -> None:
    clocks = Clocks()

    def receive(api: str) -> None:
        if api:
            clocks.steps.work = api
        clocks.work(0.011)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.call_soon(timed(loop, "network", receive), "Metadata")
        loop.call_soon(timed(loop, "network", receive), "")
        loop.call_soon(done.set_result, None)
        await done

    clocks.run(main)
    assert clocks.slow() == {"Metadata": 1, "network": 1}


def test_a_step_that_fails_or_is_canceled_is_timed_too() -> None:
    clocks = Clocks()

    async def failing() -> None:
        clocks.work(0.012)
        raise KeyError

    async def canceled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            clocks.work(0.013)

    async def main() -> None:
        with pytest.raises(KeyError):
            await asyncio.create_task(failing())
        task = asyncio.create_task(canceled())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    clocks.run(main)
    assert sum(clocks.slow().values()) == 2


def test_the_longest_step_is_forgotten_after_two_windows() -> None:
    clocks = Clocks()

    def step(seconds: float) -> None:
        began = clocks.steps.begin("work")
        clocks.work(seconds)
        clocks.steps.end(began)

    step(0.008)
    clocks.now += loop_steps.WINDOW_S
    assert clocks.steps.longest.seconds == pytest.approx(0.008)
    step(0.002)
    assert clocks.steps.longest.seconds == pytest.approx(0.008)
    clocks.now += loop_steps.WINDOW_S
    assert clocks.steps.longest.seconds == pytest.approx(0.002)
    assert clocks.steps.longest_processor.seconds == pytest.approx(0.002)
    clocks.now += 3 * loop_steps.WINDOW_S
    assert clocks.steps.longest.seconds == 0


def test_the_clock_of_the_processor_is_read_rarely() -> None:
    clocks = Clocks()
    for _ in range(1_000):
        began = clocks.steps.begin("work")
        clocks.work(0.00001)
        clocks.steps.end(began)
    assert clocks.read < 20


def test_a_loop_without_timing_is_left_alone() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        steps = LoopSteps()
        with steps.installed(loop):
            assert loop.get_task_factory() is steps
        assert loop.get_task_factory() is None
        assert timed(loop, "network", print) is print

    asyncio.run(main())


def test_a_task_shows_the_name_and_the_code_of_its_coroutine() -> None:
    shown: list[str] = []

    async def sleeper() -> None:
        await asyncio.sleep(3600)

    async def main() -> None:
        task = asyncio.create_task(sleeper())
        await asyncio.sleep(0)
        shown.append(repr(task))
        task.cancel()

    Clocks().run(main)
    assert "sleeper" in shown[0] and "test_loop_steps.py" in shown[0]
