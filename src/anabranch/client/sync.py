"""The same clients as plain synchronous classes.

Each object runs its asyncio counterpart on an event loop of its own, in a thread of its own; a method runs its call on
that loop and waits. Only the calls that would be slow that way are written here: `send`, which hands records over
without waiting, and `poll_arrow`, which decodes in the caller's thread. An object belongs to the process that made it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from time import time
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import uvloop

from anabranch import client as aio
from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.consumer.group import CLOSE_TIMEOUT_MS
from anabranch.client.consumer.listeners import in_callback
from anabranch.client.consumer.offsets import OffsetsByPartition
from anabranch.client.consumer.record import COLUMNS, Record
from anabranch.client.producer.delivery import ColumnsMetadata
from anabranch.client.producer.intake import WIDTH, Intake, Row, Tray
from anabranch.client.producer.outcome import News, RecordOutcome, TableOutcome
from anabranch.client.producer.outcome import Outcome as Outcome
from anabranch.client.producer.producer import as_bytes
from anabranch.client.producer.records import Options
from anabranch.client.producer.rows import ColumnNames, Header, RecordMetadata
from anabranch.client.settings import as_keywords
from anabranch.client.table.synchronous import KeyedTable as KeyedTable

if TYPE_CHECKING:
    import pyarrow as pa

Inner = TypeVar("Inner", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")


class _Process:
    """The id of this process, and the intakes of its producers, which take no records in a fork of it."""

    def __init__(self) -> None:
        self.id = os.getpid()
        self.intakes: weakref.WeakSet[Intake] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.id = os.getpid()
        for intake in self.intakes:
            intake.disown()


_this_process = _Process()


class _LoopThread:
    """An event loop in a daemon thread, for one process."""

    def __init__(self) -> None:
        self._process = _this_process.id
        self._stopped = False
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="anabranch-client", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the thread does not run in this process."""
        if not self.running:
            if self._process != os.getpid():
                text = (
                    f"this client was made in process {self._process}, and is used in {os.getpid()}; make one in each"
                )
                raise ApiError(ErrorCode.INVALID_REQUEST, text)
            raise ApiError(ErrorCode.INVALID_REQUEST, "this client is closed; make a new one")

    def begin(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Run a coroutine on the loop."""
        try:
            self.check()
        except ApiError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the loop and wait for it; an interrupt cancels it."""
        future = self.begin(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in the thread, as callbacks of outcomes do."""
        return threading.get_ident() == self._thread.ident

    @property
    def running(self) -> bool:
        """Whether the thread runs, in this process."""
        return not self._stopped and _this_process.id == self._process

    def stop(self) -> None:
        """End the thread and the loop."""
        if self.running:
            self._stopped = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.run_until_complete(_end_tasks())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Callbacks:
    """Runs rebalance listeners in the thread that polls, so that they may use the client."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )

    async def invoke(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """On the loop: request the call of a function in the caller's thread, and wait for its end."""
        if inspect.iscoroutinefunction(function):
            await function(*arguments)
            return
        outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((lambda: function(*arguments), outcome))
        await asyncio.wrap_future(outcome)

    def serve(self, thread: _LoopThread, coroutine: Coroutine[Any, Any, R]) -> R:
        """In the caller's thread: run a coroutine on the loop, and meanwhile the calls requested by `invoke`."""
        future = thread.begin(coroutine)
        future.add_done_callback(lambda _: self._calls.put(None))
        try:
            while True:
                call = self._calls.get()
                if call is None:
                    if future.done():
                        return future.result()
                    continue
                function, outcome = call
                token = in_callback.set(True)
                try:
                    outcome.set_result(function())
                except BaseException as error:
                    outcome.set_exception(error)
                    if not isinstance(error, Exception):
                        raise
                finally:
                    in_callback.reset(token)
        except BaseException:
            future.cancel()
            raise


class _Synchronous(Generic[Inner]):
    """An asyncio client on a loop of its own."""

    _inner: Inner
    _thread: _LoopThread

    def _start(self, inner: Any) -> None:
        self._inner = inner
        self._thread = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client, as the asyncio client's `close` does."""
        self._end()

    def _end(self, *args: Any) -> None:
        if self._thread.running:
            try:
                self._thread.run(self._inner.close(*args))  # type: ignore[attr-defined]
            finally:
                self._thread.stop()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a client for settings by Kafka's dotted names, as in `{"bootstrap.servers": "..."}`."""
        return cls(**as_keywords(cls, config))


def _like(
    model: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the signature of the asyncio client's."""

    def signed(constructor: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        return cast("Callable[Concatenate[Any, P], None]", wraps(model)(constructor))

    return signed


def _awaited(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_Synchronous[Inner], P], R]:
    """Make the synchronous form of a coroutine method."""

    @wraps(method)
    def call(self: _Synchronous[Inner], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._inner, *args, **kwargs))

    return call


def _called(method: Callable[Concatenate[Inner, P], R]) -> Callable[Concatenate[_Synchronous[Inner], P], R]:
    """Make the synchronous form of a plain method, which runs on the loop as well."""

    @wraps(method)
    def call(self: _Synchronous[Inner], /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def run() -> R:
            return method(self._inner, *args, **kwargs)

        return self._thread.run(run())

    return call


def _awaited_with_callbacks(
    method: Callable[Concatenate[aio.Consumer, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Consumer, P], R]:
    """Make the synchronous form of a coroutine method that may call rebalance listeners."""

    @wraps(method)
    def call(self: Consumer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._callbacks.serve(self._thread, method(self._inner, *args, **kwargs))

    return call


class Admin(_Synchronous[aio.Admin]):
    """Administers topics and groups; see `anabranch.client.Admin`."""

    @_like(aio.Admin.__init__)
    def __init__(self, *args: Any, **settings: Any) -> None:
        self._start(aio.Admin(*args, **settings))

    create_topics = _awaited(aio.Admin.create_topics)
    delete_topics = _awaited(aio.Admin.delete_topics)
    list_topics = _awaited(aio.Admin.list_topics)
    topics = _awaited(aio.Admin.topics)
    describe_topics = _awaited(aio.Admin.describe_topics)
    describe_load = _awaited(aio.Admin.describe_load)
    describe_slices = _awaited(aio.Admin.describe_slices)
    lineage = _awaited(aio.Admin.lineage)
    explain = _awaited(aio.Admin.explain)
    resize = _awaited(aio.Admin.resize)
    resizes = _awaited(aio.Admin.resizes)
    cancel_resize = _awaited(aio.Admin.cancel_resize)
    delete_records = _awaited(aio.Admin.delete_records)
    list_offsets = _awaited(aio.Admin.list_offsets)
    topic_offsets = _awaited(aio.Admin.topic_offsets)
    describe_configs = _awaited(aio.Admin.describe_configs)
    alter_configs = _awaited(aio.Admin.alter_configs)
    describe_cluster = _awaited(aio.Admin.describe_cluster)
    list_groups = _awaited(aio.Admin.list_groups)
    describe_groups = _awaited(aio.Admin.describe_groups)
    delete_groups = _awaited(aio.Admin.delete_groups)
    list_group_offsets = _awaited(aio.Admin.list_group_offsets)
    alter_group_offsets = _awaited(aio.Admin.alter_group_offsets)
    delete_group_offsets = _awaited(aio.Admin.delete_group_offsets)
    end_transaction = _awaited(aio.Admin.end_transaction)
    describe_transactions = _awaited(aio.Admin.describe_transactions)


class Consumer(_Synchronous[aio.Consumer]):
    """Reads the partitions that are assigned to it, or its share of a group's; see `anabranch.client.Consumer`.

    Rebalance listeners are called in the thread that polls; async ones run on the client's own loop.
    """

    @_like(aio.Consumer.__init__)
    def __init__(self, *args: Any, **settings: Any) -> None:
        self._callbacks = _Callbacks()
        inner = aio.Consumer(*args, **settings)
        inner.call_back_with(self._callbacks.invoke)
        self._start(inner)

    @property
    def inner(self) -> aio.Consumer:
        """The asyncio consumer, for what is built on consumers."""
        return self._inner

    def wait_for(self, work: Coroutine[Any, Any, R]) -> R:
        """Run work of what is built on this consumer on its loop, and wait for it."""
        return self._thread.run(work)

    assign = _called(aio.Consumer.assign)
    subscribe = _called(aio.Consumer.subscribe)
    subscription = _called(aio.Consumer.subscription)
    unsubscribe = _awaited_with_callbacks(aio.Consumer.unsubscribe)
    commit = _awaited(aio.Consumer.commit)
    done = _called(aio.Consumer.done)
    reject = _called(aio.Consumer.reject)
    run = _awaited_with_callbacks(aio.Consumer.run)
    stop = _called(aio.Consumer.stop)
    committed = _awaited(aio.Consumer.committed)
    offsets_to_commit = _called(aio.Consumer.offsets_to_commit)
    ranges_of = _called(aio.Consumer.ranges_of)
    group_metadata = _called(aio.Consumer.group_metadata)
    assignment = _called(aio.Consumer.assignment)
    key_ranges = _called(aio.Consumer.key_ranges)
    seek = _awaited(aio.Consumer.seek)
    seek_to_beginning = _awaited(aio.Consumer.seek_to_beginning)
    seek_to_end = _awaited(aio.Consumer.seek_to_end)
    seek_to_time = _awaited(aio.Consumer.seek_to_time)
    position = _awaited(aio.Consumer.position)
    pause = _awaited(aio.Consumer.pause)
    resume = _awaited(aio.Consumer.resume)
    paused = _called(aio.Consumer.paused)
    lineage = _called(aio.Consumer.lineage)
    poll = _awaited_with_callbacks(aio.Consumer.poll)
    beginning_offsets = _awaited(aio.Consumer.beginning_offsets)
    end_offsets = _awaited(aio.Consumer.end_offsets)
    offsets_for_times = _awaited(aio.Consumer.offsets_for_times)
    lag = _awaited(aio.Consumer.lag)

    def poll_arrow(
        self,
        timeout_s: float | None = 1.0,
        max_bytes: int | None = None,
        *,
        columns: Sequence[str] = COLUMNS,
        key_range: tuple[int, int] | None = None,
        filter: aio.RecordFilter | None = None,
    ) -> pa.Table:
        """Return the next records as a table; see `anabranch.client.Consumer.poll_arrow`."""
        while True:
            parts = self._callbacks.serve(self._thread, self._inner.gather(timeout_s, max_bytes, filter))
            table = self._inner.table(parts, columns, key_range)
            if not parts or self._hand_out(parts):
                return table

    _hand_out = _called(aio.Consumer.hand_out)

    def __iter__(self) -> Iterator[Record]:
        at_once = self._inner.polled_at_once
        while True:
            yield from self._inner.one_by_one(self.poll(timeout_s=None, max_records=at_once))

    def commit_async(self, offsets: OffsetsByPartition | None = None) -> concurrent.futures.Future[None]:
        """Commit without waiting; the returned future is the outcome. Commits run in the order of the calls."""
        self._thread.check()

        async def commit() -> None:
            await self._inner.commit_async(offsets)

        return asyncio.run_coroutine_threadsafe(commit(), self._thread.loop)

    def close(self, *, leave: bool | None = None, timeout_s: float = CLOSE_TIMEOUT_MS / 1000) -> None:
        """Commit, revoke all partitions, leave, and close; see `anabranch.client.Consumer.close`."""
        if self._thread.running:
            try:
                self._callbacks.serve(self._thread, self._inner.close(leave=leave, timeout_s=timeout_s))
            finally:
                self._thread.stop()


class Producer(_Synchronous[aio.Producer]):
    """Sends records to topics, keeping the order of each key through every resize; see `anabranch.client.Producer`."""

    @_like(aio.Producer.__init__)
    def __init__(self, *args: Any, **settings: Any) -> None:
        self._news = News()
        inner = aio.Producer(*args, **settings)
        self._start(inner)
        loop, take = self._thread.loop, inner.take_waiting
        self._intake = inner.take_in(lambda: loop.call_soon_threadsafe(take), self._news)
        self._transactional = inner.transactional
        _this_process.intakes.add(self._intake)

    flush = _awaited(aio.Producer.flush)
    init_transactions = _awaited(aio.Producer.init_transactions)
    begin_transaction = _awaited(aio.Producer.begin_transaction)
    send_offsets_to_transaction = _awaited(aio.Producer.send_offsets_to_transaction)
    commit_transaction = _awaited(aio.Producer.commit_transaction)
    prepare_transaction = _awaited(aio.Producer.prepare_transaction)
    abort_transaction = _awaited(aio.Producer.abort_transaction)

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """`with producer.transaction():` begins, and commits at the end, or aborts after an exception."""
        self.begin_transaction()
        try:
            yield self
            self.commit_transaction()
        except BaseException:
            if self._inner.abortable:
                self.abort_transaction()
            raise

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, then close. After `timeout_s` the remaining records fail, and the error gives their number."""
        if self._thread.running:
            self._intake.seal()
        self._end(timeout_s)

    def send(
        self,
        topic: str,
        value: bytes | str | None = None,
        *,
        key: bytes | str | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Sequence[Header] = (),
    ) -> Outcome[RecordMetadata]:
        """Append one record to the buffer; the returned outcome is pending. Waits while the buffer is full."""
        if type(key) is not bytes and key is not None:
            key = as_bytes(key, "key")
        if type(value) is not bytes and value is not None:
            value = as_bytes(value, "value")
        now = time()
        when: float | Options = now
        if partition is not None or timestamp is not None or headers:
            when = Options(int(now * 1000) if timestamp is None else timestamp, headers, partition)
        if self._transactional:
            self._inner.check_transaction()
        # From here on as `intake` describes; every step more would cost a percent.
        tray = self._intake.tray
        rows = tray.rows
        rows += (topic, key, value, when)
        end = len(rows)
        if end > tray.limit or rows[-1] is not when:
            tray, end = self._place(tray, (topic, key, value, when))
        outcome = RecordOutcome()
        outcome.receipt = tray.receipt
        outcome.place = end // WIDTH - 1
        return outcome

    def _place(self, tray: Tray, row: Row) -> tuple[Tray, int]:
        """Find a record in the tray from which it is taken; wake the loop for it, or wait for room.

        The loop's own thread cannot wait for the loop: what callbacks send is taken in even if the buffer is full.
        """
        intake = self._intake
        try:
            self._thread.check()
        except ApiError:
            intake.disown()
            raise
        waits = not self._thread.is_current
        if waits and self._inner.is_full and intake.withdraw(tray, row):
            self._thread.run(self._inner.wait_for_room())
        tray, end = intake.place(tray, row)
        if waits and end > intake.limit:
            self._thread.run(self._inner.take_now())
        return tray, end

    def send_arrow(
        self,
        topic: str,
        table: pa.Table | pa.RecordBatch,
        *,
        key: str | None = "key",
        value: str | None = "value",
        headers: str | None = None,
        timestamp: str | None = None,
        partition: int | None = None,
    ) -> Outcome[ColumnsMetadata]:
        """Append the rows of a table as records; see `anabranch.client.Producer.send_arrow`."""
        promise: TableOutcome[ColumnsMetadata] = TableOutcome(self._news)
        columns = ColumnNames(key, value, headers, timestamp)
        self._thread.run(self._inner.take_columns(topic, table, columns, partition, promise))
        return promise
