"""How long steps on the event loop take, and whose steps they are.

A step is what runs on the loop without a pause: a coroutine up to its next await, or a callback. The loop serves
nobody meanwhile, so that a step should take less than `SLOW_STEP_S`. `LoopSteps.installed` has the steps of all tasks
timed, `timed` those of a callback; a step belongs to the work that it was begun for, or that it names while it runs
(`work`). A slow step is counted and logged, at most one line in `LOG_INTERVAL_S`.

Two times are kept of a step: the time that passed, and how much of it this thread had the processor. The first is what
clients wait; the second does not grow when others use the machine, and falls below the first where a step waits for a
disk or for the interpreter. The clock of the processor is read at most once in `MARK_INTERVAL_S`, because that takes
five times as long as reading the other, so that the processor's time of a step is too large by up to that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator
from time import perf_counter, thread_time
from typing import Any, NamedTuple, ParamSpec

from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.metrics import Metrics

events = EventLogger("loop")
SLOW_STEP_S = 0.010
MARK_INTERVAL_S = 0.001
WINDOW_S = 60.0
"""The longest step is that of the last one to two windows."""
LOG_INTERVAL_S = 10.0
OTHER_WORK = "other"
Given = ParamSpec("Given")


class Step(NamedTuple):
    """A step, and what it was done for."""

    seconds: float
    work: str


NO_STEP = Step(0.0, OTHER_WORK)


class LoopSteps:
    """The times of the steps of one event loop."""

    def __init__(
        self,
        metrics: Metrics | None = None,
        *,
        clock: Callable[[], float] = perf_counter,
        processor: Callable[[], float] = thread_time,
    ) -> None:
        self.work = OTHER_WORK
        """The work that the running step is done for: the name of an API, or of a coroutine."""
        self.clock = clock
        self._processor = processor
        self._limit = EventLimit(LOG_INTERVAL_S)
        self._metrics = metrics or Metrics()
        self._longest = self._longest_processor = self._earlier = self._earlier_processor = NO_STEP
        self._window_end = clock() + WINDOW_S
        self.mark_due = float("-inf")
        """When the clock of the processor is read again."""
        self.noted = 0.0
        """A step of at most this time is not slow, and the longest in neither way."""
        self._marked_processor = 0.0
        gauges = self._metrics.gauges
        name, doc = "anabranch_loop_step_seconds_max", "The longest step on the event loop of late, and its work."
        gauges(name, doc, lambda: [_sample(self.longest)])
        name, doc = (
            "anabranch_loop_step_processor_seconds_max",
            "The most processor time of a step of late, and its work.",
        )
        gauges(name, doc, lambda: [_sample(self.longest_processor)])

    # -- timing ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Time the steps of the tasks that the loop begins meanwhile."""
        before = loop.get_task_factory()
        loop.set_task_factory(self)
        try:
            yield
        finally:
            if loop.get_task_factory() is self:
                loop.set_task_factory(before)

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> asyncio.Task[Any]:
        """Make a task: the task factory of the loop."""
        if not isinstance(coroutine, _Timed):
            coroutine = _Timed(self, name_of(coroutine), coroutine)
        return asyncio.Task(coroutine, loop=loop, **how)

    def named(self, work: str, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Have the steps of a coroutine, which becomes a task, belong to `work`."""
        return _Timed(self, work, coroutine)

    def begin(self, work: str) -> float:
        """Begin a step; give the result to `end`."""
        now = self.clock()
        if now > self.mark_due:
            self.mark(now)
        self.work = work
        return now

    def end(self, began: float) -> None:
        """End the step that was begun."""
        took = self.clock() - began
        if took > self.noted:
            self.note(took, began)

    def mark(self, now: float) -> None:
        """Read the clock of the processor."""
        self.mark_due = now + MARK_INTERVAL_S
        self._marked_processor = self._processor()

    # -- what was noted ----------------------------------------------------------------------------------------------

    @property
    def longest(self) -> Step:
        """The longest step in the last one to two windows."""
        self._turn_window(self.clock())
        return max(self._longest, self._earlier)

    @property
    def longest_processor(self) -> Step:
        """The step with the most processor time in the last one to two windows."""
        self._turn_window(self.clock())
        return max(self._longest_processor, self._earlier_processor)

    def forget(self) -> None:
        """Begin anew."""
        self._longest = self._longest_processor = self._earlier = self._earlier_processor = NO_STEP
        self.noted = 0.0

    def _turn_window(self, now: float) -> None:
        if now >= self._window_end:
            recent = now < self._window_end + WINDOW_S
            self._earlier = self._longest if recent else NO_STEP
            self._earlier_processor = self._longest_processor if recent else NO_STEP
            self._longest = self._longest_processor = NO_STEP
            self.noted = 0.0
            self._window_end = now + WINDOW_S

    def note(self, took: float, began: float) -> None:
        """Note a step that may be the longest."""
        now = began + took
        self._turn_window(now)
        processor = min(took, self._processor() - self._marked_processor)
        self._longest = max(self._longest, Step(took, self.work))
        self._longest_processor = max(self._longest_processor, Step(processor, self.work))
        self.noted = min(self._longest_processor.seconds, SLOW_STEP_S)
        if took > SLOW_STEP_S:
            self._slow(took, processor, now)
        if processor > SLOW_STEP_S:
            name, doc = "anabranch_loop_long_steps_total", "Steps of more than 10 ms of processor time."
            self._metrics.counter(name, doc, work=self.work).add()

    def _slow(self, took: float, processor: float, now: float) -> None:
        self._metrics.counter(
            "anabranch_loop_slow_steps_total", "Steps on the event loop of more than 10 ms.", work=self.work
        ).add()
        suppressed = self._limit.admit(now)
        if suppressed is not None:
            events.warning(
                "slow step on the event loop",
                work=self.work,
                ms=round(took * 1000, 1),
                processor_ms=round(processor * 1000, 1),
                suppressed=suppressed,
            )


def _sample(step: Step) -> tuple[dict[str, str], float]:
    return {"work": step.work}, step.seconds


def timed(loop: asyncio.AbstractEventLoop, work: str, callback: Callable[Given, None]) -> Callable[Given, None]:
    """Have a callback of the loop timed, where steps are; it belongs to `work` unless it names another."""
    steps = loop.get_task_factory()
    if not isinstance(steps, LoopSteps):
        return callback
    clock = steps.clock

    def step(*given: Given.args, **named: Given.kwargs) -> None:
        """`begin` and `end` without calls: the loop is called back with every request."""
        began = clock()
        if began > steps.mark_due:
            steps.mark(began)
        steps.work = work
        try:
            callback(*given, **named)
        finally:
            if (took := clock() - began) > steps.noted:
                steps.note(took, began)

    return step


def name_of(coroutine: object) -> str:
    """The name of a coroutine or a function."""
    return str(getattr(coroutine, "__qualname__", type(coroutine).__qualname__))


class _Timed(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are timed."""

    __slots__ = ("_coroutine", "_send", "_steps", "_work")

    def __init__(self, steps: LoopSteps, work: str, coroutine: Any) -> None:
        self._steps = steps
        self._work = work
        self._coroutine = coroutine
        self._send = coroutine.send

    def __getattr__(self, name: str) -> Any:
        """The name, frame and code of the coroutine, for whoever shows a task."""
        return getattr(self._coroutine, name)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        """As `send(None)`, which is each step of a task: `begin` and `end` without calls."""
        steps = self._steps
        began = steps.clock()
        if began > steps.mark_due:
            steps.mark(began)
        steps.work = self._work
        try:
            return self._send(None)
        finally:
            if (took := steps.clock() - began) > steps.noted:
                steps.note(took, began)

    def send(self, value: Any) -> Any:
        steps = self._steps
        began = steps.begin(self._work)
        try:
            return self._send(value)
        finally:
            steps.end(began)

    def throw(self, *error: Any) -> Any:
        steps = self._steps
        began = steps.begin(self._work)
        try:
            return self._coroutine.throw(*error)
        finally:
            del error  # Or it holds this frame, and the frame holds it.
            steps.end(began)

    def close(self) -> None:
        self._coroutine.close()
