"""The parallel handler: many records of a consumer at a time, each key in order, exactly what is done is committed.

Workers take ready records and call the handler: async handlers on the event loop, plain functions in threads. Beside
them one task polls: it carries out the group's events, commits, and fills the tracker. The rules:

- a record is done when its handler returns; a failed one stops the work, comes again, or is left out (`policy`);
- before a partition is revoked, its running handlers end, within `drain_timeout_s`; later async ones are cancelled. A
  thread cannot be: it goes on, its end counts for nothing, and records of its key wait for it if the partition returns;
- a handler that runs for longer than `max.poll.interval.ms` loses the member its place, as a loop that polls would.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.record import Record
from anabranch.client.consumer.state import current_record
from anabranch.client.consumer.unfinished import Handler, Unfinished, record_of
from anabranch.machines.clients.processing import Entry, OnError, Retry, Verdict, decide_failure
from anabranch.runtime.wakeup import Wakeup

if TYPE_CHECKING:
    from anabranch.client.consumer.driver import FetchingDriver

DeadLetter = Callable[[Record, Exception], Awaitable[object] | object]
"""What becomes of a record that is left out; awaited before the record counts as done."""
Decide = Callable[[Record, Exception], OnError]
"""What an application decides about a failed record."""
CANCELLED_S = 1.0
"""How long a cancelled handler may take to end."""
LAST_COMMIT_MS = 5_000
"""How long the commit of a cancelled run may take."""
REFILL = 256
"""Finished records after which the tracker is filled again."""

_log = logging.getLogger("anabranch.client")


class RejectError(Exception):
    """Raised by a handler: hand the record out again, after `retry_after` seconds; later records of its key wait."""

    def __init__(self, retry_after: float = 0.0) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after


class Pool:
    """One run of a handler."""

    def __init__(
        self,
        driver: FetchingDriver,
        unfinished: Unfinished,
        handler: Handler,
        *,
        parallel: int,
        on_error: OnError | Decide,
        dead_letter: DeadLetter | None,
        drain_timeout_s: float,
    ) -> None:
        if parallel < 1:
            raise ValueError("parallel must be at least 1")
        if not callable(on_error):
            _check_policy(on_error)
        self._driver = driver
        self._unfinished = unfinished
        self._tracker = unfinished.tracker
        self._handler: Any = handler
        self._parallel = parallel
        self._on_error = on_error
        self._dead_letter = dead_letter
        self._drain_timeout_s = drain_timeout_s
        self._threads: ThreadPoolExecutor | None = None
        if not _is_async(handler):
            self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="anabranch-handler")
        self._stopping = False
        self._failure: BaseException | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._idle: list[asyncio.Future[None]] = []
        self._busy: dict[int, asyncio.Task[None]] = {}
        """The workers by the leases of the records that they work on."""
        self._ended = Wakeup()
        """Set when a record has ended."""
        self._refill_at = 0
        self._over = asyncio.Event()
        """Set at the end of the run."""

    # -- the run ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop`, an error, or cancellation; then finish, commit, and raise the error, if any."""
        self._unfinished.owner = self
        self._tracker.orphaning = True
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._parallel)]
        cancelled = False
        try:
            while not self._stopping:
                await self._turn()
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            self._stopping = True
            try:
                await self._end(cancelled=cancelled)
            finally:
                self._over.set()
        if self._failure is not None:
            raise self._failure

    async def ended(self) -> None:
        """Stop, and wait for the end of the run. Raises `ApiError` if a handler asks: the run waits for it."""
        if asyncio.current_task() in self._workers:
            raise run_refused("be closed")
        self.stop()
        await self._over.wait()

    def stop(self) -> None:
        """End the run once the handlers that run have returned."""
        self._stopping = True
        self._driver.nudge()

    async def _turn(self) -> None:
        driver, group, tracker = self._driver, self._driver.group, self._tracker
        driver.begin_turn()
        if group is not None:
            group.start()
            group.poll_began()
        try:
            self._unfinished.note_progress()
            await driver.attend()
            driver.pump()
            driver.raise_errors()
            goes_on = await self._unfinished.fill()
        finally:
            if group is not None:
                group.poll_ended(tracker.oldest_started_ms)
        tracker.mature(driver.now_ms())
        self._wake()
        self._refill_at = max(tracker.unfinished - REFILL, 2 * self._parallel)
        if goes_on and tracker.ready < 2 * self._parallel:
            driver.pump()
            await asyncio.sleep(0)
            driver.nudge()
            return
        await driver.wait_for_turn(tracker.wake_ms)

    def _wake(self) -> None:
        for _ in range(min(len(self._idle), self._tracker.ready)):
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)

    async def _end(self, *, cancelled: bool) -> None:
        """Let what runs end, unless the run was cancelled; commit what is done; leave the rest to later polls."""
        if not cancelled or self._threads is not None:
            await self._drain(self._tracker.running)
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers, timeout=CANCELLED_S)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._unfinished.note_progress()
        group = self._driver.group
        try:
            if group is not None:
                await group.commit_processed(LAST_COMMIT_MS if cancelled else None)
        finally:
            self._unfinished.owner = None
            self._unfinished.wind_up()
            self._tracker.orphaning = False

    # -- one record ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        worker = asyncio.current_task()
        assert worker is not None
        tracker, driver, now_ms, busy = self._tracker, self._driver, self._driver.now_ms, self._busy
        call = self._in_thread if self._threads is not None else self._handler
        while True:
            entry = None if self._stopping else tracker.next(now_ms())
            if entry is None:
                waiter = loop.create_future()
                self._idle.append(waiter)
                await waiter
                continue
            busy[entry.lease] = worker
            record = record_of(entry)
            current_record.set(record)
            try:
                try:
                    await call(record)
                except Exception as error:
                    await self._failed(entry, record, error)
                else:
                    tracker.done(entry.lease, entry.deliveries)
            except BaseException as error:  # Cancelled, or the end of the program.
                driver.undo(record)
                tracker.reject(entry.lease, entry.deliveries, now_ms())
                if not worker.cancelling():
                    text = f"the handler of {record.topic}-{record.partition}, offset {record.offset}, was cancelled"
                    self._stop_for(AnabranchError(text) if isinstance(error, asyncio.CancelledError) else error)
            finally:
                del busy[entry.lease]
                self._ended.set()
            if worker.cancelling():
                if self._stopping:
                    return
                worker.uncancel()
            if tracker.unfinished <= self._refill_at:
                driver.nudge()

    async def _in_thread(self, record: Record) -> None:
        context = copy_context()  # With `current_record`.
        running = asyncio.get_running_loop().run_in_executor(self._threads, context.run, self._handler, record)
        result = await asyncio.shield(running)
        if inspect.isawaitable(result):
            await result

    async def _failed(self, entry: Entry, record: Record, error: Exception) -> None:
        """Carry out what the policy decides about a failed record, or what the handler has asked for."""
        tracker, now_ms = self._tracker, self._driver.now_ms
        self._driver.undo(record)
        if isinstance(error, RejectError):
            tracker.reject(entry.lease, entry.deliveries, now_ms() + int(error.retry_after * 1000))
            self._driver.nudge()
            return
        try:
            decided = self._on_error(record, error) if callable(self._on_error) else self._on_error
            verdict, delay_ms = decide_failure(_check_policy(decided), entry.deliveries)
            if verdict is Verdict.SKIP:
                await self._leave_out(record, error)
        except Exception as another:
            another.__context__ = error
            verdict, delay_ms, error = Verdict.STOP, 0, another
        if verdict is Verdict.SKIP:
            tracker.done(entry.lease, entry.deliveries)
        else:
            tracker.reject(entry.lease, entry.deliveries, now_ms() + delay_ms)
        if verdict is Verdict.STOP:
            self._stop_for(error)
        self._driver.nudge()

    async def _leave_out(self, record: Record, error: Exception) -> None:
        if self._dead_letter is not None:
            result = self._dead_letter(record, error)
            if inspect.isawaitable(result):
                await result
            return
        _log.error(
            "%s-%d: the record at offset %d was left out: %r", record.topic, record.partition, record.offset, error
        )

    def _stop_for(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        elif self._failure is not error:
            self._failure.add_note(f"and: {error!r}")
        self.stop()

    # -- the end of partitions ----------------------------------------------------------------------------------------

    async def settle(self, partitions: Sequence[TopicPartition], partly: Container[TopicPartition] = ()) -> None:
        """Finish the running records of partitions that are revoked, within the time; start no others of them.

        Of those in `partly` only the records that leave (`Unfinished.part`): the others go on.
        """
        whole = [tp for tp in partitions if tp not in partly]
        parted = [tp for tp in partitions if tp in partly]
        for tp in whole:
            self._tracker.hold(tp)
        tracker = self._tracker
        await self._drain(lambda: tracker.running(whole) + tracker.running(parted, leaving=True))
        self._unfinished.note_progress()

    async def _drain(self, running: Callable[[], Sequence[Entry]]) -> None:
        """Wait until some records have ended; cancel async handlers at the timeout."""
        if await self._ends(running, self._drain_timeout_s) or self._threads is not None:
            return
        late = running()
        _log.warning("%d handlers did not end within %g s, and are cancelled", len(late), self._drain_timeout_s)
        self._cancel(late)
        await self._ends(running, CANCELLED_S)

    async def _ends(self, running: Callable[[], Sequence[Entry]], timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while running():
            self._ended.clear()
            left = deadline - loop.time()
            if left <= 0 or not await self._ended.wait(left):
                return False
        return True

    def lost(self, entries: Sequence[Entry]) -> None:
        """End the work on records of partitions that were lost: other members may have them."""
        if self._threads is None:
            self._cancel(entries)

    def _cancel(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            worker = self._busy.get(entry.lease)
            if worker is not None:
                worker.cancel()


def _is_async(handler: Any) -> bool:
    while hasattr(handler, "func"):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(handler.__call__)


def _check_policy(decided: Any) -> OnError:
    if isinstance(decided, Retry) or decided in ("stop", "skip"):
        return decided  # type: ignore[no-any-return]
    raise ApiError(ErrorCode.INVALID_REQUEST, f"on_error is {decided!r}; it can be 'stop', 'skip' or a Retry")


def run_refused(what: str) -> AnabranchError:
    """The error of a call that does not go with a handler that runs."""
    return ApiError(ErrorCode.INVALID_REQUEST, f"this consumer runs a handler, and cannot {what} meanwhile; stop it")
