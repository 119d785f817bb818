"""An event loop on virtual time: asyncio code runs on it unchanged, without sleeping, the same way for the same seed.

- Time stops while any callback is ready, and jumps to the next timer otherwise. `loop.time()` starts at 0.
- Callbacks due at the same time run in the order in which they were scheduled. Futures and tasks hash by their
  number, so sets of them have the same order in every run.
- Executors run nothing: their functions run in the loop's thread, at a drawn moment, and complete at a later one.
- A `Process` is a group of tasks, callbacks and timers that can be killed at any point, like a machine that loses its
  power: no code of the process runs afterwards, no `except` and no `finally`.
- Waiting for nothing (no callback, no timer), too many steps, and an error in a callback end the simulation.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar, TypeVarTuple, cast
from weakref import WeakSet

from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import File
from anabranch.runtime.syncs import Syncs, Told

STEPS_MAX = 1_000_000
STEPS_TO_END_MAX = 10_000
WALL_CLOCK_START_MS = 1_700_000_000_000
EXECUTOR_DELAY_MAX_S = 0.004
DEFAULT_WORKERS = 8

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_process: ContextVar[Process | None] = ContextVar("process", default=None)


class SimulationError(AssertionError):
    """The simulation cannot go on."""


class DeadlockError(SimulationError):
    """Tasks wait, and no callback or timer could wake them."""


class StepLimitError(SimulationError):
    """The simulation took more steps than allowed: it is in an endless loop."""


class KilledError(Exception):
    """The process was killed before the call ended."""


class _Future(asyncio.Future[Any]):
    """Hashes by its number, which is the same in every run, as an address is not; few futures are ever hashed."""

    number = 0

    def __hash__(self) -> int:
        if not self.number:
            loop = self.get_loop()
            assert isinstance(loop, VirtualLoop)
            self.number = next(loop.numbers)
        return self.number


class _Task(asyncio.Task[Any]):
    """Hashes by its number; refers to its process."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: VirtualLoop, context: Context | None) -> None:
        self.number = next(loop.numbers)
        self.process = _process.get() if context is None else context.get(_process)
        super().__init__(coroutine, loop=loop, context=context)
        if self.process is not None:
            self.process.tasks.add(self)

    def __hash__(self) -> int:
        return self.number


class _Step(asyncio.TimerHandle):
    """A callback, ready or with a time; made without what the loop does not need, for there are very many."""

    __slots__ = ()
    _callback: Callable[..., object]
    _context: Context
    _when: float

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        context: Context | None,
    ) -> None:
        self._when = when
        self._context = copy_context() if context is None else context
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._args = ()  # The loop drops the handle when its time comes.

    def __repr__(self) -> str:
        return f"<{'cancelled' if self._cancelled else self._callback} at {self._when} s>"


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without sockets, threads and sleep."""

    _ready: deque[_Step]  # type: ignore[assignment]
    _closed: bool
    _stopping: bool

    def __init__(self, seed: int, *, steps_max: int = STEPS_MAX) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        """The source of every delay."""
        self.steps = 0
        self.steps_max = steps_max
        self.failure: BaseException | None = None
        """The first error of a callback: it ends the simulation."""
        self.outside = Context()
        """The context of callbacks outside of all processes."""
        self._now_s = 0.0
        self.now_ms = 0
        """Virtual time in ms."""
        self._timers: list[tuple[float, int, _Step]] = []
        self.numbers = itertools.count(1)
        self._workers: dict[Executor | None, list[float]] = {}
        """The time at which each worker of an executor is free."""
        self._processes: list[Process] = []
        self._ending = False
        self.set_debug(False)
        self.set_task_factory(_make_task)
        self.set_exception_handler(_note_failure)

    # -- time ----------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._now_s

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Step(when, callback, args, context)
        heappush(self._timers, (when, next(self.numbers), timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Step(self._now_s + delay, callback, args, context)
        heappush(self._timers, (timer._when, next(self.numbers), timer))
        return timer

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("the loop is closed")
        handle = _Step(self._now_s, callback, args, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """Run callbacks until the loop is stopped; whenever none is ready, advance the time to the next timer."""
        timers, ready = self._timers, self._ready
        while True:
            self.steps += 1
            if self.steps > self.steps_max:
                raise StepLimitError(f"more than {self.steps_max} steps; {self._waiting_tasks()}")
            while timers and timers[0][2]._cancelled:
                heappop(timers)
            if not ready and not self._stopping:
                if not timers:
                    raise DeadlockError(f"nothing is ready and no timer is set; {self._waiting_tasks()}")
                if timers[0][0] > self._now_s:
                    self._now_s = timers[0][0]
                    self.now_ms = round(self._now_s * 1000)
            now_s = self._now_s
            while timers and timers[0][0] <= now_s:
                ready.append(heappop(timers)[2])
            self._run(ready)
            if self._stopping:
                return

    def _run(self, ready: deque[_Step]) -> None:
        """Run the callbacks that are ready now, but for cancelled ones and those of dead processes."""
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            context = handle._context
            process = context.get(_process)
            if process is not None and (not process.alive or process.is_watched) and not process.may_run(handle):
                continue
            try:
                context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.failure = self.failure or error
            if self.failure is not None and not self._ending:
                raise self.failure

    def _waiting_tasks(self) -> str:
        tasks = [task for task in asyncio.all_tasks(self) if _alive(task)]
        if not tasks:
            return "no task waits"
        return "these wait: " + ", ".join(sorted(map(_place, tasks)))

    # -- futures, executors --------------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func` in this thread, later, and complete later still. Functions of one worker keep their order."""
        future: asyncio.Future[T] = self.create_future()
        workers = self._workers.get(executor)
        if workers is None:
            count: int = getattr(executor, "_max_workers", DEFAULT_WORKERS)
            workers = self._workers[executor] = [0.0] * count
        worker = min(range(len(workers)), key=workers.__getitem__)
        run_at = max(workers[worker], self._now_s) + self.chance.uniform(0, EXECUTOR_DELAY_MAX_S)
        workers[worker] = end_at = run_at + self.chance.uniform(0, EXECUTOR_DELAY_MAX_S)

        def run() -> None:
            if self._ending or future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                self.call_at(end_at, _complete, future, None, error)
            else:
                self.call_at(end_at, _complete, future, result, None)

        self.call_at(run_at, run)
        return future

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: Sequence[Any]) -> None:
        raise NotImplementedError("there is no socket in a simulation")

    # -- processes and the end -----------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        """Begin a process."""
        process = Process(self, name)
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Cancel everything, of killed processes too, so that nothing is left half run; then close."""
        self._ending = True
        for process in self._processes:
            process.thaw()
        self.steps_max = self.steps + STEPS_TO_END_MAX
        try:
            while left := [task for task in asyncio.all_tasks(self) if not task.done()]:
                for task in left:
                    task.cancel()
                self.run_until_complete(asyncio.wait(left))
            self.run_until_complete(self.shutdown_asyncgens())
        except SimulationError:
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.close()


class Process:
    """Tasks, callbacks and timers that are killed together: everything started inside a process belongs to it."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.killed: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._context = Context()
        self._context.run(_process.set, self)
        self._frozen: list[_Step] = []
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._kept: list[asyncio.Task[Any]] = []
        """The tasks of a dead process; nothing else may refer to them any more."""
        self._left: int | None = None
        self._on_step: Callable[[], None] | None = None
        self.is_watched = False
        """Whether `may_run` must be asked before every step, while the process is alive."""

    @property
    def context(self) -> Context:
        """Return a context of the process, for a callback to run in it."""
        return self._context.copy()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the process, now."""
        return self._context.copy().run(function, *args)

    def create_task(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task of the process."""
        return self._loop.create_task(coroutine, name=name, context=self.context)

    async def perform(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the process, from outside. Raises `KilledError` if the process dies before the end."""
        if not self.alive:
            coroutine.close()
            raise KilledError(self.name)
        task = self.create_task(coroutine)
        await asyncio.wait((task, self.killed), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise KilledError(self.name)
        return task.result()

    def kill(self) -> None:
        """Stop the process: none of its code runs from now on."""
        if self.alive:
            self.alive = False
            self._kept = [task for task in self.tasks if not task.done()]
            self.killed.set_result(None)

    def kill_in(self, steps: int | None) -> None:
        """Kill the process instead of running its step after `steps` more of them; None: not."""
        self._left = steps
        self.is_watched = True

    def watch(self, on_step: Callable[[], None]) -> None:
        """Call `on_step` before every step of the process: `kill_in(n)` kills it after n such calls."""
        self._on_step = on_step
        self.is_watched = True

    def may_run(self, handle: _Step) -> bool:
        """Whether a step of the process may run; a step of a dead process is put aside."""
        if self._on_step is not None and self.alive:
            self._on_step()
        if self.alive and self._left is not None:
            self._left -= 1
            if self._left < 0:
                self.kill()
        if not self.alive:
            self._frozen.append(handle)
        return self.alive

    def thaw(self) -> None:
        """Release a dead process, at the end of the simulation, to be cancelled."""
        self.alive, self._left = True, None
        for handle in self._frozen:
            self._loop._ready.append(handle)
        self._frozen.clear()


class VirtualClock(Clock):
    """The clocks of a simulated machine: virtual time, and a wall clock that may be set wrong."""

    def __init__(self, loop: VirtualLoop, wall_ms: int = WALL_CLOCK_START_MS) -> None:
        self.wall_ms = wall_ms
        """The wall clock when the loop's time was 0."""
        self._loop = loop

    def now_ms(self) -> int:
        return self.wall_ms + self.monotonic_ms()

    def monotonic_ms(self) -> int:
        return int(self._loop.time() * 1000)


class VirtualSyncs(Syncs):
    """Syncs of files, each at a random moment and reported at a later one."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def sync(self, files: Sequence[File], done: Told) -> None:
        def work() -> None:
            for file in files:
                file.sync()

        self.run(work, done)

    def run(self, work: Callable[[], None], done: Told) -> None:
        def told(future: asyncio.Future[None]) -> None:
            error = future.exception()
            if error is not None and not isinstance(error, OSError):
                raise error
            done(error)

        self._loop.run_in_executor(None, work).add_done_callback(told)

    def close(self) -> None:
        pass


class Pipe(Generic[T]):
    """One direction of a connection: messages arrive in order, each after a drawn delay, in the receiver's process.

    A pipe outlives its sender: sent messages still arrive. Messages in flight when the pipe breaks never do.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        receive: Callable[[T], None],
        *,
        delay_s: Callable[[], float],
        receiver: Process | None = None,
    ) -> None:
        self._loop = loop
        self._receive = receive
        self._delay_s = delay_s
        self._receiver = receiver
        self._arrives_at = 0.0
        self._flying: deque[T] = deque()
        self._last: int | None = None
        self._sent = self._arrived = 0

    @property
    def in_flight(self) -> int:
        """The number of messages sent but not arrived."""
        return self._sent - self._arrived

    def send(self, message: T) -> None:
        """Send a message; a broken pipe loses the message."""
        if self._last is not None:
            return
        self._sent += 1
        self._arrives_at = max(self._arrives_at, self._loop.time() + self._delay_s())
        context = self._loop.outside.copy() if self._receiver is None else self._receiver.context
        self._loop.call_at(self._arrives_at, self._arrive, message, self._sent, context=context)

    def _arrive(self, message: T, number: int) -> None:
        if self._last is None or number <= self._last:
            self._arrived = number
            self._receive(message)

    def stall(self, seconds: float) -> None:
        """Delay all messages for a while."""
        self._arrives_at = max(self._arrives_at, self._loop.time() + seconds)

    def close(self, *, lose: int | None = None) -> None:
        """Close the pipe; the last `lose` messages in flight are lost (by default all)."""
        if self._last is None:
            self._last = self._arrived if lose is None else max(self._arrived, self._sent - lose)


def run(coroutine: Coroutine[Any, Any, T], seed: int, *, steps_max: int = STEPS_MAX) -> T:
    """Run a coroutine to its end on a virtual loop of its own, which `running_loop()` returns inside of it."""
    loop = VirtualLoop(seed, steps_max=steps_max)
    try:
        result = loop.run_until_complete(coroutine)
    finally:
        loop.end()
    return result


def running_loop() -> VirtualLoop:
    """The virtual loop that runs now."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, context: Context | None = None, **named: Any
) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    return _Task(coroutine, loop, context)


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Note the error of a callback, and of a task that is collected before its error was retrieved."""
    assert isinstance(loop, VirtualLoop)
    loop.failure = loop.failure or context.get("exception") or SimulationError(context["message"])


def _complete(future: asyncio.Future[T], result: T | None, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(cast(T, result))
    else:
        future.set_exception(error)


def _process_of(task: asyncio.Task[Any]) -> Process | None:
    return task.process if isinstance(task, _Task) else None


def _alive(task: asyncio.Task[Any]) -> bool:
    process = _process_of(task)
    return process is None or process.alive


def _place(task: asyncio.Task[Any]) -> str:
    """Return the place where a task waits: its name, and the line."""
    stack = task.get_stack(limit=1)
    place = f" at {stack[0].f_code.co_filename.rpartition('/')[2]}:{stack[0].f_lineno}" if stack else ""
    return f"{task.get_name()} ({task.get_coro()!r}){place}"
