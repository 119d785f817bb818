"""Where produced batches are checked: in the event loop as far as it can wait, others in a thread of their own.

The rule: a request holds the loop for LOOP_US at most at a time, by the estimates of `machines.partition.checking`.
What does not fit into its turn is done in a single thread, so that no more than one such batch is expanded at a time,
and a producer of large batches waits for others of its kind, not for the loop. No check is done twice.

Searches for times in batches of logs have a thread of their own, too: those of one request together are bounded, and a
connection has one search in line at a time, so that who asks for many does not keep others waiting. Both look into
batches by machine code (`runtime.native`) as soon as there is any, before that in plain Python.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.machines.partition.appending import Refuse
from anabranch.machines.partition.checking import (
    BatchLimits,
    CheckedBatch,
    Effort,
    TooLongError,
    check_batches,
    takes_longer,
)
from anabranch.records.examination import Examine, examine
from anabranch.records.filtering import Scatter, scatter
from anabranch.records.timestamps import Search, search
from anabranch.runtime import native
from anabranch.runtime.events import EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.thread_work import to_the_end
from anabranch.runtime.turns import KeyedTurns

events = EventLogger("checks")
T = TypeVar("T")
LOOP_US = 2_000
PLAIN_RECORD_US, NATIVE_RECORD_US = 2.0, 0.02

BESIDE_RECORDS = 100_000_000
"""The records, or what takes as long, that one request may have examined: by machine code two seconds of work, in which
batches can expand to half a gigabyte. Who sends more, by thousands of small bombs, gets the rest refused."""
BESIDE_S = 4.0
"""The processor's time that the checks of one request may take in the thread, whatever was estimated."""
SEARCH_S = 4.0
"""The processor's time that the searches of one request may take in their thread: a batch within all limits, 300 kB of
records that expand to 63 MB, takes 0.15 s. A client asks again for what is left."""
SEARCHING_S = 8.0
"""The time after which a request that has searched once leaves the rest: with others beside it, it would have no answer
before its client gives up, and asks for all of it again."""
COPIED_SIZE_MAX = 64 << 20
"""Bytes of recompressed batches that wait to be appended, over all connections, with which who has none must wait."""
TOO_MUCH = Refuse(
    ErrorCode.MESSAGE_TOO_LARGE,
    "The request has more to be decompressed and examined than a broker does for one request.",
)

Checked = list[CheckedBatch] | Refuse


class Unchecked(NamedTuple):
    """What a request has for one partition."""

    data: memoryview
    limits: BatchLimits


class RequestSearches:
    """The searches of one request, and how much they may still take."""

    def __init__(self, search: Search, thread: ThreadPoolExecutor, turns: KeyedTurns, connection: int) -> None:
        self._search = search
        self._thread = thread
        self._turns = turns
        self._connection = connection
        self._left_s = SEARCH_S
        self._until_s = time.monotonic() + SEARCHING_S
        self._has_looked = False

    @property
    def are_spent(self) -> bool:
        """Whether those before have taken as long as the searches of one request may, or waited so long for others."""
        return self._left_s <= 0 or (self._has_looked and time.monotonic() >= self._until_s)

    async def look(self, work: Callable[[Search], T]) -> T:
        """Do a search in a batch of a log, in the thread; others of its connection wait for it, not in the line."""
        self._has_looked = True
        async with self._turns.taken(self._connection):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, work)

    def _timed(self, work: Callable[[Search], T]) -> T:
        began = time.thread_time()
        try:
            return work(self._search)
        finally:
            self._left_s -= time.thread_time() - began


class Copies:
    """The batches of a part of a request that were recompressed, from their checks until they are appended.

    A request of a few kilobytes has copies of megabytes. They count over all connections; where others have as many as
    are allowed, a check waits until some of these are appended. The last that was let in never waits, as the others
    have no more than when it was.
    """

    def __init__(self, checks: BatchChecks) -> None:
        self._checks = checks
        self._held: list[memoryview] = []
        self.size = 0

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *error: object) -> None:
        """Free the copies, which nobody else holds any more, in a thread: a megabyte takes 0.2 ms."""
        if self._held:
            self._checks.copied -= self.size
            self._checks.wake()
            asyncio.get_running_loop().run_in_executor(None, self._held.clear)

    def count(self, sent: memoryview, checked: Checked) -> Checked:
        """Count what a check has copied, and return its outcome."""
        if isinstance(checked, list):
            copied = [batch.data for batch in checked if batch.data.obj is not sent.obj]
            size = sum(map(len, copied))
            self._held += copied
            self.size += size
            self._checks.copied += size
        return checked


class BatchChecks:
    """The checks of one broker, and its searches."""

    def __init__(self) -> None:
        self.copied = 0
        """Bytes of all `Copies`."""
        self._beside = asyncio.Lock()
        self._room: set[asyncio.Future[None]] = set()
        self.search: Search = search
        self.scatter: Scatter = scatter
        self._examine: Examine = examine
        self._record_us = PLAIN_RECORD_US
        self._thread = ThreadPoolExecutor(1, "checks")
        self._readers = ThreadPoolExecutor(1, "searches")
        self._searching = KeyedTurns()

    def describe_in(self, metrics: Metrics) -> None:
        """Have a gauge of what they hold."""
        description = "Bytes of recompressed batches that wait to be appended."
        metrics.gauge("anabranch_recompressed_bytes", description, lambda: self.copied)

    def use(self, found: native.Native) -> None:
        """Look into batches by machine code from now on."""
        self._examine, self._record_us = found.examine, NATIVE_RECORD_US
        self.search, self.scatter = found.search, found.scatter

    async def load(self) -> None:
        """Use machine code; have it compiled by another process before, if there is none yet."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, native.load)  # Reading it, and its tables, take up to 8 ms.
        if found is None:
            reason = await _compile()
            found = await loop.run_in_executor(self._thread, native.load)
            if found is None:
                events.warning("batches are looked into slowly, there is no machine code", reason=reason)
                return
        self.use(found)

    def now(self, data: memoryview, limits: BatchLimits, now_ms: int) -> Checked:
        """Check all that a request has. TooLongError where the loop cannot wait for that."""
        return check_batches(data, limits, now_ms, self._examine, self._turn())

    def all_now(self, sent: Iterable[Unchecked], now_ms: int) -> list[Checked]:
        """As `now`, for several partitions: the loop waits no longer for all of them together."""
        sent = list(sent)
        if takes_longer((each.data for each in sent), LOOP_US, self._record_us):
            raise TooLongError
        effort = self._turn()
        return [check_batches(data, limits, now_ms, self._examine, effort) for data, limits in sent]

    def copies(self) -> Copies:
        """Return what `beside` counts the copies in that it makes."""
        return Copies(self)

    def wake(self) -> None:
        """Have those go on that wait for room for copies."""
        for waiting in self._room:
            if not waiting.done():
                waiting.set_result(None)

    async def beside(self, sent: Iterable[Unchecked], now_ms: int, copies: Copies) -> list[Checked]:
        """Check what the loop can wait for there, and the rest in the thread, which takes a turn of the loop each.

        The thread reads and corrects the batches where they lie, so a cancellation waits for the one it looks into.
        """
        effort = Effort(BESIDE_RECORDS * self._record_us, self._record_us, is_generous=True)
        taken = 0.0

        def check(data: memoryview, limits: BatchLimits) -> Checked:
            nonlocal taken
            if taken > BESIDE_S:
                return TOO_MUCH
            began = time.thread_time()
            try:
                return check_batches(data, limits, now_ms, self._examine, effort)
            except TooLongError:
                return TOO_MUCH
            finally:
                taken += time.thread_time() - began

        # One partition at a time, so that requests take turns.
        checked: list[Checked] = []
        turn = self._turn()
        for data, limits in sent:
            try:
                checked.append(check_batches(data, limits, now_ms, self._examine, turn))
            except TooLongError:
                work = partial(to_the_end, self._thread, check, data, limits, give_up=effort.give_up)
                checked.append(await self._with_room(copies, data, work))
                turn = self._turn()
        return checked

    async def _with_room(self, copies: Copies, sent: memoryview, check: Callable[[], Awaitable[Checked]]) -> Checked:
        """Make a check when others have room for its copies, which count before the next check looks."""
        while True:
            while self.copied - copies.size >= COPIED_SIZE_MAX:
                await self._until_some_are_appended()
            async with self._beside:
                if self.copied - copies.size < COPIED_SIZE_MAX:
                    return copies.count(sent, await check())

    async def _until_some_are_appended(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._room.add(waiting)
        try:
            await waiting
        finally:
            self._room.discard(waiting)

    def _turn(self) -> Effort:
        """What the loop can wait for."""
        return Effort(LOOP_US, self._record_us, clock=time.thread_time)

    def searches(self, connection: int) -> RequestSearches:
        """Return the searches of a request that has come over a connection, of which there are none yet."""
        return RequestSearches(self.search, self._readers, self._searching, connection)

    def close(self) -> None:
        """Give up the work that waits for the threads."""
        for thread in (self._thread, self._readers):
            thread.shutdown(wait=False, cancel_futures=True)


async def _compile() -> str:
    """Have the code compiled by another process, which ends with this one; the last that the process said."""
    try:
        compiler = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", native.__name__), stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return str(error)
    try:
        _, said = await compiler.communicate()
    finally:
        if compiler.returncode is None:
            compiler.kill()
    return said.decode(errors="replace").strip().rpartition("\n")[2]
