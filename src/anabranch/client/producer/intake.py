"""Records on their way from the threads that send them to the loop of their producer.

A sender appends a record to the list of the current tray, without a lock, and makes sure afterwards that the record is
where it is taken from. The loop puts an empty tray in the place of the current one, and takes what its list has then.

    sender: append to `tray.rows` -> compare with `tray.limit` -> done, or `Intake.place`
    loop:   new tray -> `tray.limit = 0` -> `tray.taken = len(tray.rows)` -> read so many

The rule: a record is taken exactly once, and behind every record whose `send` returned before its own began. A record
that was appended before the loop read the length is taken. Of a record that came later the limit was 0 before, so its
sender notices, and appends the record to the next tray before `send` returns. Elements beyond `taken` are not read. The
limit is also 0 until the first record of a tray has woken the loop, and it is reached when the sender should wait. A
sender that finds the buffer full takes its record back while it waits, so that a `send` that raises has sent nothing.

The last element of a record is an object of its own, by which `place` finds the record where other threads send, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.producer.outcome import News, Receipt
from anabranch.client.producer.records import Options, is_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDTH = 4
"""Elements of a record in a tray: topic, key, value, and the time in seconds or the options."""
RECORDS_MAX = 10_000
"""Records in a tray when senders begin to wait for the loop; fewer if they are large."""
Row: TypeAlias = tuple[str, bytes | None, bytes | None, float | Options]


class Tray:
    """Records that are taken together."""

    __slots__ = ("limit", "receipt", "rows", "taken")

    def __init__(self, news: News) -> None:
        self.rows: list[Any] = []
        """The elements of all records, one record after another."""
        self.limit = 0
        """A sender whose record ends behind so many elements calls `Intake.place`."""
        self.taken = -1
        """The number of elements that the loop took, or -1."""
        self.receipt = Receipt(news)

    def by_topic(self) -> Iterator[tuple[str | None, list[Any], list[Any], list[Any], NDArray[np.int64]]]:
        """Yield topic, keys, values, times or options, and places of the records of each topic, in their order.

        The topic is None for records whose topic is no name.
        """
        import numpy as np

        rows, end = self.rows, self.taken
        topics = rows[0:end:WIDTH]
        columns = [rows[column:end:WIDTH] for column in range(1, WIDTH)]
        if _are_one_name(topics):
            keys, values, times = columns
            yield topics[0], keys, values, times, np.arange(len(topics))
            return
        places: dict[str | None, list[int]] = {}
        for place, topic in enumerate(topics):
            places.setdefault(topic if isinstance(topic, str) else None, []).append(place)
        for topic, chosen in places.items():
            keys, values, times = ([column[place] for place in chosen] for column in columns)
            yield topic if is_name(topic) else None, keys, values, times, np.array(chosen)


class Intake:
    """Takes records in from any thread; `wake` has the loop call `take` soon."""

    def __init__(self, wake: Callable[[], object], news: News) -> None:
        self.tray = Tray(news)
        """The current tray."""
        self.limit = WIDTH * RECORDS_MAX
        """The limit of trays whose first record has come. Set by the loop."""
        self._wake = wake
        self._news = news
        self._left: Tray | None = None
        """The tray that was the current one when the intake was sealed."""
        self._sealed = False
        # Signal handlers and finalizers send records, too, between any two steps of a thread.
        self._lock = threading.RLock()

    def place(self, tray: Tray, row: Row) -> tuple[Tray, int]:
        """Find a record that was appended to `tray`, or append it to the current tray if it came too late there.

        Returns the tray from which the record is taken, and the end of the record in its list. Raises `ApiError` for a
        record that came after `seal`.
        """
        with self._lock:
            while True:
                end = _end_of(row, tray.rows)
                if tray is self.tray and not self._sealed:
                    if not tray.limit:
                        self._wake()
                        tray.limit = self.limit
                    return tray, end
                if 0 <= end <= tray.taken:
                    return tray, end
                if self._sealed:
                    self.disown()
                    raise ApiError(ErrorCode.INVALID_REQUEST, "this client is closed; make a new one")
                tray = self.tray
                tray.rows += row

    def withdraw(self, tray: Tray, row: Row) -> bool:
        """Take back a record that was appended to `tray`: it is not sent until it is placed. False if it is on its way.

        It takes a tray whose first record has not been placed: the senders of the others notice, and place them anew.
        """
        with self._lock:
            if tray is not self.tray:
                return not 0 <= _end_of(row, tray.rows) <= tray.taken
            if tray.limit or self._sealed:
                return False
            self.disown()
            return True

    def take(self) -> Tray | None:
        """Take the records that have come; None if none have."""
        with self._lock:
            tray, self._left = self._left, None
            if tray is None and not self._sealed and self.tray.rows:
                tray = self._ended()
        return tray if tray is not None and tray.taken else None

    def seal(self) -> None:
        """Take no more records in; those that came before can still be taken."""
        with self._lock:
            if not self._sealed:
                self._sealed = True
                self._left = self._ended()

    def disown(self) -> None:
        """Drop the records, and have every sender call `place`: where nothing takes them, as in a forked process."""
        self.tray = Tray(self._news)

    def _ended(self) -> Tray:
        tray, self.tray = self.tray, Tray(self._news)
        tray.limit = 0
        tray.taken = len(tray.rows)
        tray.receipt.count = tray.taken // WIDTH
        return tray


def _are_one_name(topics: list[Any]) -> bool:
    try:
        return is_name(topics[0]) and topics.count(topics[0]) == len(topics)
    except Exception:  # whatever was given instead of a name compares as it likes: an array raises
        return False


def _end_of(row: Row, rows: list[Any]) -> int:
    """Find the record in a list, from the last one backwards: only those of other threads can be behind it."""
    mark = row[-1]
    for end in range(len(rows), 0, -WIDTH):
        if rows[end - 1] is mark:
            return end
    raise AssertionError("a record is in the list to which it was appended")
