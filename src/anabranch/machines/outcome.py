"""What a decision gives back: the records to persist, the reply to give once they are durable, the timers to set.

The rule: nothing is answered before its records are durable, and `apply(state, record)` is the only code that changes
state, live and on reload (architecture.md, decision 2).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Reply = TypeVar("Reply", covariant=True)
Record = TypeVar("Record", covariant=True)


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Wake the machine with `key` at `at_ms`; it replaces an earlier timer of that key."""

    key: Hashable
    at_ms: int


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Forget the timer of `key`, if there is one."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Parked:
    """In place of a reply: it comes with a later outcome, as the `Answer` with this ticket."""

    ticket: Hashable


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to a request that was parked."""

    ticket: Hashable
    reply: Any


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Reply, Record]):
    """Persist `records` in order, as one batch, apply them, set `timers`, then answer `reply` and `answers`."""

    reply: Reply
    records: tuple[Record, ...] = ()
    timers: tuple[SetTimer | CancelTimer, ...] = ()
    answers: tuple[Answer, ...] = ()
    producer: tuple[int, int] | None = None
    """Producer id and epoch under which the records are written, pending until the transaction's marker."""
    effects: tuple[Any, ...] = ()
    """What the shell is to perform once the records are durable, such as sending a message to another machine."""
