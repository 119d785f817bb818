"""The listener's decisions: accept a connection, begin a request, close a connection.

Nothing here reads a clock or a socket. The rules bound what peers can make the broker hold: the number of open
connections, the requests of each that wait for their answer, and the time that one may occupy memory in silence.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from anabranch.base.limits import IN_FLIGHT_PER_CONNECTION_MAX


class Verdict(Enum):
    """The verdict on an open connection."""

    KEEP = ""
    IDLE = "idle"
    SILENT = "silent in the middle of a request or an answer for connections.max.idle.ms"
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


class Admission:
    """The bounds of one listener."""

    def __init__(self, *, connections_max: int, idle_max_ms: int, stalled_max_ms: int) -> None:
        self.connections_max = connections_max
        self._idle_max_s = idle_max_ms / 1000
        self._stalled_max_s = stalled_max_ms / 1000

    def takes(self, open_connections: int) -> bool:
        """Whether one more connection is taken."""
        return open_connections < self.connections_max

    def judge(self, activity: Activity, now_s: float, *, contended: bool) -> Verdict:
        """Decide on an open connection; `contended`: other connections wait for request memory."""
        held_since = activity.held_since
        if contended and held_since is not None and held_since < now_s - self._stalled_max_s:
            return Verdict.STALLED
        if activity.progress_at < now_s - self._idle_max_s and (not activity.busy or activity.unsent):
            return Verdict.IDLE if held_since is None and not activity.unsent else Verdict.SILENT
        return Verdict.KEEP


def may_begin(waiting: int, unsent: int) -> bool:
    """Whether a connection's next request may begin: few wait for their answer, and the peer reads its answers."""
    return waiting < IN_FLIGHT_PER_CONNECTION_MAX and not unsent
