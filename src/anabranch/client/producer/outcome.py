"""Outcomes for threads: of one record or table that was handed over to a client with an event loop of its own.

A record's outcome is made with every `send`, so it is only a place in a receipt. The records that were taken over
together share the receipt, in which the fate of each is entered when its batch is delivered. The producer itself refers
to no outcome, except for those that have callbacks.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from anabranch.client.producer.rows import Fate, RecordMetadata

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

R = TypeVar("R")
_log = logging.getLogger("anabranch.client")


class Outcome(Generic[R]):
    """The outcome of a record or table that was handed over; `result` waits for it.

    Has the reader's side of `concurrent.futures.Future`, at a tenth of its cost.
    """

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Whether the outcome is known."""

    def result(self, timeout: float | None = None) -> R:
        """Wait at most `timeout` seconds for the result; raise the error if the record or table failed."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait at most `timeout` seconds; return the error, or None on success."""
        if not self.done() and not self._news_of().wait_for(self.done, timeout):
            raise TimeoutError(f"no outcome after {timeout} s")
        return self._error()

    @abstractmethod
    def add_done_callback(self, callback: Callable[[Outcome[R]], object]) -> None:
        """Call `callback` with the outcome, in the client's thread; at once if the outcome is known."""

    @abstractmethod
    def _news_of(self) -> News: ...

    @abstractmethod
    def _result(self) -> R: ...

    @abstractmethod
    def _error(self) -> BaseException | None: ...


class TableOutcome(Outcome[R]):
    """The outcome of a table: a promise that the client's thread keeps."""

    __slots__ = ("_callbacks", "_kept", "_news")

    def __init__(self, news: News) -> None:
        self._news = news
        self._kept: tuple[Any, BaseException | None] | None = None
        self._callbacks: list[Callable[[Outcome[R]], object]] | None = None

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._kept is not None

    def add_done_callback(self, callback: Callable[[Outcome[R]], object]) -> None:
        """Call `callback` with the outcome, in the client's thread; at once if the outcome is known."""
        with self._news.lock:
            self._callbacks = [*(self._callbacks or ()), callback]
        # `_kept` is read after the callback is stored, and set before callbacks are read, so no callback is missed.
        if self._kept is not None:
            self._call_back()

    def set_result(self, result: R) -> None:
        """Complete with a result."""
        self._keep(result, None)

    def set_exception(self, exception: BaseException) -> None:
        """Complete with an error."""
        self._keep(None, exception)

    def _keep(self, result: Any, error: BaseException | None) -> None:
        self._kept = result, error
        if self._callbacks is not None:
            self._call_back()
        self._news.tell()

    def _call_back(self) -> None:
        with self._news.lock:
            callbacks, self._callbacks = self._callbacks, None
        _call(callbacks or (), self)

    def _news_of(self) -> News:
        return self._news

    def _result(self) -> R:
        assert self._kept is not None
        return cast(R, self._kept[0])

    def _error(self) -> BaseException | None:
        assert self._kept is not None
        return self._kept[1]


class RecordOutcome(Outcome[RecordMetadata]):
    """The outcome of one record: its place in a receipt. `Producer.send` sets both attributes."""

    __slots__ = ("place", "receipt")
    receipt: Receipt
    place: int

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.receipt.knows(self.place)

    def add_done_callback(self, callback: Callable[[Outcome[RecordMetadata]], object]) -> None:
        """Call `callback` with the outcome, in the client's thread; at once if the outcome is known."""
        self.receipt.call_back(self, callback)

    def _news_of(self) -> News:
        return self.receipt.news

    def _result(self) -> RecordMetadata:
        return self.receipt.metadata(self.place)

    def _error(self) -> BaseException | None:
        return self.receipt.error(self.place)


class Receipt:
    """What became of records that were taken over together, by their places: 0 for the first, and so on.

    A place is known from when its element of `_fate_at` is not 0; all else that is said of it was written before.
    """

    __slots__ = ("_callbacks", "_fate_at", "_fates", "_offsets", "_times", "count", "news")

    def __init__(self, news: News) -> None:
        self.news = news
        self.count = 0
        """The number of places, set before the first of them is known."""
        self._fates: list[Fate | BaseException | None] = [None]
        """What batches became, or the error of those that failed."""
        self._fate_at: NDArray[np.int32] | None = None
        """The index in `_fates` of each place, 0 for those that are not known."""
        self._offsets: NDArray[np.int64] | None = None
        self._times: NDArray[np.int64] | None = None
        self._callbacks: dict[int, list[tuple[RecordOutcome, Callable[[Outcome[RecordMetadata]], object]]]] = {}

    def knows(self, place: int) -> bool:
        """Whether the outcome of a place is known."""
        fate_at = self._fate_at
        return fate_at is not None and bool(fate_at[place])

    def error(self, place: int) -> BaseException | None:
        """Return the error of a known place, None if its record was delivered."""
        assert self._fate_at is not None
        fate = self._fates[self._fate_at[place]]
        return fate if isinstance(fate, BaseException) else None

    def metadata(self, place: int) -> RecordMetadata:
        """Return the metadata of the record of a known place, which was delivered."""
        assert self._fate_at is not None and self._offsets is not None and self._times is not None
        fate = self._fates[self._fate_at[place]]
        assert isinstance(fate, Fate)
        return RecordMetadata(fate.topic, fate.partition, int(self._offsets[place]), int(self._times[place]))

    def delivered(self, places: NDArray[np.int64], fate: Fate, times: NDArray[np.int64] | int) -> None:
        """Enter the places of records of one batch, in their order in the batch, with the times of each or of all."""
        if self._offsets is None or self._times is None:
            import numpy as np

            self._times = np.zeros(self.count, np.int64)
            self._offsets = np.zeros(self.count, np.int64)
        self._offsets[places] = fate.offsets
        self._times[places] = times
        self._know(places, fate)

    def failed(self, places: NDArray[np.int64], error: BaseException) -> None:
        """Enter the places of records that failed with the same error."""
        self._know(places, error)

    def call_back(self, outcome: RecordOutcome, callback: Callable[[Outcome[RecordMetadata]], object]) -> None:
        """Call `callback` when the outcome's place is known, or now."""
        with self.news.lock:
            self._callbacks.setdefault(outcome.place, []).append((outcome, callback))
        # The place is looked at after the callback is stored, and known before callbacks are read: none is missed.
        if self.knows(outcome.place):
            self._call_back([outcome.place])

    def _know(self, places: NDArray[np.int64], fate: Fate | BaseException) -> None:
        if self._fate_at is None:
            import numpy as np

            self._fate_at = np.zeros(self.count, np.int32)
        self._fates.append(fate)
        self._fate_at[places] = len(self._fates) - 1
        if self._callbacks:
            self._call_back(places.tolist())
        self.news.tell()

    def _call_back(self, places: Iterable[int]) -> None:
        for place in places:
            with self.news.lock:
                callbacks = self._callbacks.pop(place, ())
            for outcome, callback in callbacks:
                _call((callback,), outcome)


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


def _call(callbacks: Iterable[Callable[[Any], object]], outcome: Outcome[Any]) -> None:
    """Call back; a callback that raises harms no other outcome of the batch."""
    for callback in callbacks:
        try:
            callback(outcome)
        except Exception:
            _log.exception("a callback of an outcome raised an exception: %r", callback)
