"""The states of a transactional id and their transitions.

    EMPTY ──► ONGOING ──► PREPARE_COMMIT ──► COMPLETE_COMMIT ──┐
      ▲          │                                             ├──► EMPTY, ONGOING or DEAD
      │          └──────► PREPARE_ABORT ───► COMPLETE_ABORT ───┘
      └── a producer is initialized

PREPARE is the decision: once it is durable the transaction will be committed, or aborted, also after crashes. COMPLETE
means that every partition has its marker. DEAD is written as a tombstone: the id is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum


class State(IntEnum):
    """How far a transaction is: the numbers of Kafka's log records, with Kafka's names in `title`."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6

    @property
    def title(self) -> str:
        """The name that DescribeTransactions and ListTransactions give it."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def prepared(self) -> bool:
        """Whether it is decided, and partitions wait for their markers."""
        return self in (State.PREPARE_COMMIT, State.PREPARE_ABORT)


class Event(StrEnum):
    """The events of a transactional id."""

    INITIALISED = "a producer was given an epoch"
    GREW = "partitions were added"
    COMMITTED = "the producer committed"
    ABORTED = "the producer aborted, or was fenced, or took too long"
    MARKED = "every partition has its marker"
    EXPIRED = "nobody used the id for long"


NEXT: Mapping[tuple[State, Event], State] = {
    (State.EMPTY, Event.INITIALISED): State.EMPTY,
    (State.EMPTY, Event.GREW): State.ONGOING,
    (State.EMPTY, Event.EXPIRED): State.DEAD,
    (State.ONGOING, Event.GREW): State.ONGOING,
    (State.ONGOING, Event.COMMITTED): State.PREPARE_COMMIT,
    (State.ONGOING, Event.ABORTED): State.PREPARE_ABORT,
    (State.PREPARE_COMMIT, Event.MARKED): State.COMPLETE_COMMIT,
    (State.PREPARE_ABORT, Event.MARKED): State.COMPLETE_ABORT,
    (State.COMPLETE_COMMIT, Event.INITIALISED): State.EMPTY,
    (State.COMPLETE_COMMIT, Event.GREW): State.ONGOING,
    (State.COMPLETE_COMMIT, Event.EXPIRED): State.DEAD,
    (State.COMPLETE_ABORT, Event.INITIALISED): State.EMPTY,
    (State.COMPLETE_ABORT, Event.GREW): State.ONGOING,
    (State.COMPLETE_ABORT, Event.EXPIRED): State.DEAD,
}
"""The next state for each event. A missing pair is refused, or answered without a change (`REFUSED`)."""

REFUSED: frozenset[tuple[State, Event]] = frozenset(
    {
        (State.EMPTY, Event.COMMITTED),
        (State.EMPTY, Event.ABORTED),
        (State.EMPTY, Event.MARKED),
        (State.ONGOING, Event.INITIALISED),
        (State.ONGOING, Event.MARKED),
        (State.ONGOING, Event.EXPIRED),
        (State.PREPARE_COMMIT, Event.INITIALISED),
        (State.PREPARE_COMMIT, Event.GREW),
        (State.PREPARE_COMMIT, Event.COMMITTED),
        (State.PREPARE_COMMIT, Event.ABORTED),
        (State.PREPARE_COMMIT, Event.EXPIRED),
        (State.PREPARE_ABORT, Event.INITIALISED),
        (State.PREPARE_ABORT, Event.GREW),
        (State.PREPARE_ABORT, Event.COMMITTED),
        (State.PREPARE_ABORT, Event.ABORTED),
        (State.PREPARE_ABORT, Event.EXPIRED),
        (State.COMPLETE_COMMIT, Event.COMMITTED),
        (State.COMPLETE_COMMIT, Event.ABORTED),
        (State.COMPLETE_COMMIT, Event.MARKED),
        (State.COMPLETE_ABORT, Event.COMMITTED),
        (State.COMPLETE_ABORT, Event.ABORTED),
        (State.COMPLETE_ABORT, Event.MARKED),
        *((State.DEAD, event) for event in Event),
    }
)
"""With NEXT, every pair: nothing is left undecided."""
