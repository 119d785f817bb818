"""What a decision gives back: the records to persist, the reply to give once they are durable, the timers to set.

A `Draft` is an outcome in the making: every decider gathers in one, and gives its `outcome` in the end.

The rule: nothing is answered before its records are durable, and `apply(state, record)` is the only code that changes
state, live and on reload (architecture.md, decision 2).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Reply = TypeVar("Reply", covariant=True)
Record = TypeVar("Record", covariant=True)
Written = TypeVar("Written")
Given = TypeVar("Given")


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
    """In place of a reply: it comes with a later outcome, as the `ParkedReply` with this ticket."""

    ticket: Hashable


@dataclass(frozen=True, slots=True)
class ParkedReply:
    """The reply to a request that was parked."""

    ticket: Hashable
    reply: Any


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Reply, Record]):
    """Persist `records` in order, as one batch, apply them, set `timers`, then answer `reply` and `answers`."""

    reply: Reply
    records: tuple[Record, ...] = ()
    timers: tuple[SetTimer | CancelTimer, ...] = ()
    answers: tuple[ParkedReply, ...] = ()
    producer: tuple[int, int] | None = None
    """Producer id and epoch under which the records are written, pending until the transaction's marker."""
    effects: tuple[Any, ...] = ()
    """What the shell is to perform once the records are durable, such as sending a message to another machine."""

    def followed_by(self, draft: Draft[Record]) -> Outcome[Reply, Record]:
        """The outcome with all that a draft gathered after it; the draft's records begin with those of the outcome.

        Unlike `Draft.add` this copies no order for a timer and no answer, of which there may be thousands.
        """
        assert draft.records[: len(self.records)] == [*self.records]
        return Outcome(
            self.reply,
            tuple(draft.records),
            self.timers + draft.timers,
            self.answers + draft.answers,
            self.producer,
            self.effects + tuple(draft.effects),
        )


class Draft(Generic[Written]):
    """The records, timers, answers and effects of one decision in the making, each in the order of their decision.

    Of several orders for one timer the last one counts, and of several answers to one ticket. A decider that must see
    what its own records change applies them to a copy of its state as it writes them; the draft applies nothing.
    """

    __slots__ = ("_answers", "_timers", "effects", "producer", "records")

    def __init__(self) -> None:
        self.records: list[Written] = []
        self.effects: list[Any] = []
        self.producer: tuple[int, int] | None = None
        """As `Outcome.producer`."""
        self._timers: dict[Hashable, SetTimer | CancelTimer] = {}
        self._answers: dict[Hashable, Any] = {}

    def write(self, *records: Written) -> None:
        """Persist these records, too."""
        self.records += records

    def set_timer(self, key: Hashable, at_ms: int) -> None:
        """Wake the machine with `key` at `at_ms`."""
        self._timers[key] = SetTimer(key, at_ms)

    def cancel_timer(self, key: Hashable) -> None:
        """Forget a timer, set or not."""
        self._timers[key] = CancelTimer(key)

    def answer(self, ticket: Hashable, reply: Any) -> None:
        """Give this reply to the request that was parked with `ticket`, or is to be parked by this decision."""
        self._answers[ticket] = reply

    def perform(self, *effects: Any) -> None:
        """Have the shell perform these effects, too."""
        self.effects += effects

    @property
    def timers(self) -> tuple[SetTimer | CancelTimer, ...]:
        """The orders for timers, one for each key."""
        return tuple(self._timers.values())

    @property
    def answers(self) -> tuple[ParkedReply, ...]:
        """The replies to parked requests."""
        return tuple(ParkedReply(ticket, reply) for ticket, reply in self._answers.items())

    def add(self, part: Draft[Written] | Outcome[Any, Written]) -> None:
        """Add all that another decision gathered, but for its reply and its producer."""
        self.records += part.records
        self.effects += part.effects
        for timer in part.timers:
            self._timers[timer.key] = timer
        for answer in part.answers:
            self._answers[answer.ticket] = answer.reply

    def outcome(self, reply: Given) -> Outcome[Given, Written]:
        """Give what was gathered, and this reply."""
        answers = self.answers if self._answers else ()
        return Outcome(
            reply, tuple(self.records), tuple(self._timers.values()), answers, self.producer, tuple(self.effects)
        )

    def outcome_for(self, ticket: Hashable) -> Outcome[Any, Written]:
        """Give what was gathered; the reply is the answer to `ticket` if there is one, and else `Parked`."""
        return self.outcome(self._answers.pop(ticket, Parked(ticket)))
