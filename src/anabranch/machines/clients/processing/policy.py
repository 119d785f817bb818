"""What becomes of a record whose handler failed: the work stops, the record comes again, or it is left out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

DOUBLINGS_MAX = 30


@dataclass(frozen=True, slots=True)
class Retry:
    """Hand a failed record to its handler again, after a delay that doubles with every failure.

    After `attempts` deliveries (None: without end) the work stops, or the record is left out, as `then` says.
    """

    backoff_ms: int = 100
    backoff_max_ms: int = 60_000
    attempts: int | None = None
    then: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if self.backoff_ms < 0 or self.backoff_max_ms < self.backoff_ms:
            raise ValueError("backoff_ms must be at least 0, and backoff_max_ms at least backoff_ms")
        if self.attempts is not None and self.attempts < 1:
            raise ValueError("attempts must be at least 1, or None for no limit")
        if self.then not in ("stop", "skip"):
            raise ValueError(f"then is {self.then!r}; it can be 'stop' or 'skip'")


OnError = Literal["stop", "skip"] | Retry


class Verdict(Enum):
    """What to do about a failed record."""

    STOP = auto()
    SKIP = auto()
    AGAIN = auto()


def decide_failure(on_error: OnError, deliveries: int) -> tuple[Verdict, int]:
    """Return what becomes of a record that failed in its `deliveries`-th delivery, and the delay in ms before it
    comes again.
    """
    if isinstance(on_error, Retry):
        if on_error.attempts is None or deliveries < on_error.attempts:
            delay = on_error.backoff_ms << min(deliveries - 1, DOUBLINGS_MAX)
            return Verdict.AGAIN, min(delay, on_error.backoff_max_ms)
        on_error = on_error.then
    return (Verdict.SKIP if on_error == "skip" else Verdict.STOP), 0
