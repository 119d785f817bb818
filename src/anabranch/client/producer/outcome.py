"""Outcomes for threads: of one record or table that was handed over to a client with an event loop of its own.

A producer makes an outcome for every record, so it has two attributes until somebody asks for more. The records of a
batch share what became of them: `settle` notes each record's place in the batch, and `result` finds its metadata there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

from anabranch.client.producer.rows import Outgoing, RecordMetadata

R = TypeVar("R")


class Outcome(Generic[R]):
    """The outcome of a record or table that was handed over; `result` waits for it.

    Has the reader's side of `concurrent.futures.Future`, at a tenth of its cost.
    """

    __slots__ = ("_callbacks", "_news", "_place", "_settled")

    def __init__(self, news: News) -> None:
        self._news = news
        self._settled: _Settled | None = None
        self._callbacks: list[Callable[[Outcome[R]], object]] | None = None

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._settled is not None

    def result(self, timeout: float | None = None) -> R:
        """Wait at most `timeout` seconds for the result; raise the error if the record or table failed."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._settled is not None
        return cast(R, self._settled.at(self._place))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait at most `timeout` seconds; return the error, or None on success."""
        if self._settled is None and not self._news.wait_for(self.done, timeout):
            raise TimeoutError(f"no outcome after {timeout} s")
        assert self._settled is not None
        return self._settled.error

    def add_done_callback(self, callback: Callable[[Outcome[R]], object]) -> None:
        """Call `callback` with the outcome, in the client's thread; at once if the outcome is known."""
        with self._news.lock:
            self._callbacks = [*(self._callbacks or ()), callback]
        # `_settled` is read after the callback is stored, and set before callbacks are read, so no callback is missed.
        if self._settled is not None:
            self._call_back()

    def set_result(self, result: R) -> None:
        """Complete with a result."""
        self._settle(_Settled(result))

    def set_exception(self, exception: BaseException) -> None:
        """Complete with an error."""
        self._settle(_Settled(None, exception))

    def _settle(self, settled: _Settled) -> None:
        self._place = 0
        self._settled = settled
        if self._callbacks is not None:
            self._call_back()
        self._news.tell()

    def _call_back(self) -> None:
        with self._news.lock:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)


class _Settled:
    """What became of a table, or of a record that failed."""

    def __init__(self, value: Any, error: BaseException | None = None) -> None:
        self._value = value
        self.error = error

    def at(self, place: int) -> Any:
        return self._value


class DeliveredRecords(_Settled):
    """What became of the records of a batch."""

    def __init__(self, topic: str, partition: int, base_offset: int, times: list[int] | int) -> None:
        super().__init__(None)
        self._topic = topic
        self._partition = partition
        self._base_offset = base_offset
        self._times = times

    def at(self, place: int) -> RecordMetadata:
        """Return the metadata of the record at a place of the batch."""
        times, offset = self._times, self._base_offset
        when = times if isinstance(times, int) else times[place]
        return RecordMetadata(self._topic, self._partition, offset + place if offset >= 0 else offset, when)


def settle(records: Iterable[Outgoing], delivered: DeliveredRecords) -> None:
    """Complete the promises of the records of a batch; the threads that wait are told once."""
    news: News | None = None
    for place, (_, _, _, _, _, _, promise, _) in enumerate(records):
        if isinstance(promise, Outcome):
            promise._place = place
            promise._settled = delivered
            if promise._callbacks is not None:
                promise._call_back()
            news = promise._news
        elif not promise.done():
            promise.set_result(delivered.at(place))
    if news is not None:
        news.tell()


class News:
    """Wakes threads that wait for one of many outcomes; costs nothing while no thread waits."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.waiting = 0
        """The number of waiting threads."""

    def wait_for(self, holds: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `holds`, at most `timeout` seconds; return whether it does."""
        with self.lock:
            self.waiting += 1
            try:
                return self.lock.wait_for(holds, timeout)
            finally:
                self.waiting -= 1

    def tell(self) -> None:
        """Have the waiting threads look again."""
        if self.waiting:
            with self.lock:
                self.lock.notify_all()
