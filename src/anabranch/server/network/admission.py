"""The listener's decisions: accept a connection, begin a request, close a connection.

Nothing here reads a clock or a socket. The rules bound what peers can make the broker hold: the number of open
connections, the requests of each that wait for their answer, and the time that one may occupy memory in silence.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

from anabranch.base.limits import IN_FLIGHT_PER_CONNECTION_MAX


class Verdict(Enum):
    """The verdict on an open connection."""

    KEEP = ""
    IDLE = "idle"
    SILENT = "silent in the middle of a request or an answer for connections.max.idle.ms"
    UNREAD = "its unread answers hold more than a share of queued.max.response.bytes, and others need it"
    STALLED = "others wait for the request memory that it holds without making progress"


class Activity(NamedTuple):
    """The activity of an open connection; times are on the loop's clock, in seconds."""

    progress_at: float
    """When bytes last moved in either direction."""
    held_since: float | None
    """Since when it has held memory for a request that is not whole; None if it holds none."""
    unsent: int
    """Bytes of answers that the peer has not taken."""
    busy: bool
    """Whether a request waits for its answer, or an answer to be sent."""
    answers: int = 0
    """Bytes of memory that its answers hold: slices of files hold none."""
    answers_since: float = 0.0
    """Since when they have held any."""


class Refusal(Enum):
    """Why a connection is not taken."""

    ALL = "max.connections are open"
    ADDRESS = "max.connections.per.ip are open from its address"
    RESERVED = "the last tenth of max.connections is for addresses that have few"


RESERVED_PART = 10
"""Of `max.connections` one part in so many is for addresses that hold no more than one in so many of that part."""


class Admission:
    """The bounds of one listener."""

    def __init__(
        self, *, connections_max: int, idle_max_ms: int, stalled_max_ms: int, per_address_max: int | None = None
    ) -> None:
        self.connections_max = connections_max
        self._per_address_max = connections_max if per_address_max is None else per_address_max
        reserved = connections_max // RESERVED_PART
        self._open_to_all = connections_max - reserved
        self._few = reserved // RESERVED_PART
        self._idle_max_s = idle_max_ms / 1000
        self._stalled_max_s = stalled_max_ms / 1000

    def refusal(self, open_connections: int, of_address: int) -> Refusal | None:
        """Why one more connection is not taken where so many are open, so many of them from its address."""
        if open_connections >= self.connections_max:
            return Refusal.ALL
        if of_address >= self._per_address_max:
            return Refusal.ADDRESS
        if open_connections >= self._open_to_all and of_address > self._few:
            return Refusal.RESERVED
        return None

    def judge(self, activity: Activity, now_s: float, *, contended: bool, answers_max: int | None = None) -> Verdict:
        """Decide on an open connection.

        `contended`: other connections wait for request memory. `answers_max`: the bytes of unread answers that each
        connection may hold, where all together hold too many; None where they do not.
        """
        if (
            answers_max is not None
            and activity.answers > answers_max
            and activity.answers_since < now_s - self._stalled_max_s
        ):
            return Verdict.UNREAD
        held_since = activity.held_since
        if contended and held_since is not None and held_since < now_s - self._stalled_max_s:
            return Verdict.STALLED
        if activity.progress_at < now_s - self._idle_max_s and (not activity.busy or activity.unsent):
            return Verdict.IDLE if held_since is None and not activity.unsent else Verdict.SILENT
        return Verdict.KEEP


class AnswerMemory:
    """The memory that unread answers hold, over all connections of a listener (`queued.max.response.bytes`).

    A connection whose answers wait begins no further request, so that it holds what it had begun. Above the limit those
    with more than a share of it are closed when they have held it for `stalled.request.timeout.ms`; above twice the
    limit the one with most is closed at once.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.held = 0
        self._holders: dict[Hashable, int] = {}

    def note(self, holder: Hashable, size: int) -> None:
        """Note the bytes that a connection's answers hold now."""
        self.held += size - self._holders.pop(holder, 0)
        if size:
            self._holders[holder] = size

    @property
    def share(self) -> int | None:
        """The bytes that each connection may hold; None as long as all hold less than the limit."""
        return None if self.held <= self.size_max else self.size_max // len(self._holders)

    @property
    def surplus(self) -> Hashable | None:
        """The holder that must give up its memory at once; None as long as all hold less than twice the limit."""
        if self.held <= 2 * self.size_max:
            return None
        return max(self._holders, key=lambda holder: self._holders[holder])


def may_begin(waiting: int, unsent: int) -> bool:
    """Whether a connection's next request may begin: few wait for their answer, and the peer reads its answers."""
    return waiting < IN_FLIGHT_PER_CONNECTION_MAX and not unsent
