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


class TransactionState(IntEnum):
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
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)


class TransactionEvent(StrEnum):
    """The events of a transactional id."""

    INITIALISED = "a producer was given an epoch"
    GREW = "partitions were added"
    COMMITTED = "the producer committed"
    ABORTED = "the producer aborted, or was fenced, or took too long"
    MARKED = "every partition has its marker"
    EXPIRED = "nobody used the id for long"


NEXT: Mapping[tuple[TransactionState, TransactionEvent], TransactionState] = {
    (TransactionState.EMPTY, TransactionEvent.INITIALISED): TransactionState.EMPTY,
    (TransactionState.EMPTY, TransactionEvent.GREW): TransactionState.ONGOING,
    (TransactionState.EMPTY, TransactionEvent.EXPIRED): TransactionState.DEAD,
    (TransactionState.ONGOING, TransactionEvent.GREW): TransactionState.ONGOING,
    (TransactionState.ONGOING, TransactionEvent.COMMITTED): TransactionState.PREPARE_COMMIT,
    (TransactionState.ONGOING, TransactionEvent.ABORTED): TransactionState.PREPARE_ABORT,
    (TransactionState.PREPARE_COMMIT, TransactionEvent.MARKED): TransactionState.COMPLETE_COMMIT,
    (TransactionState.PREPARE_ABORT, TransactionEvent.MARKED): TransactionState.COMPLETE_ABORT,
    (TransactionState.COMPLETE_COMMIT, TransactionEvent.INITIALISED): TransactionState.EMPTY,
    (TransactionState.COMPLETE_COMMIT, TransactionEvent.GREW): TransactionState.ONGOING,
    (TransactionState.COMPLETE_COMMIT, TransactionEvent.EXPIRED): TransactionState.DEAD,
    (TransactionState.COMPLETE_ABORT, TransactionEvent.INITIALISED): TransactionState.EMPTY,
    (TransactionState.COMPLETE_ABORT, TransactionEvent.GREW): TransactionState.ONGOING,
    (TransactionState.COMPLETE_ABORT, TransactionEvent.EXPIRED): TransactionState.DEAD,
}
"""The next state for each event. A missing pair is refused, or answered without a change (`REFUSED`)."""

REFUSED: frozenset[tuple[TransactionState, TransactionEvent]] = frozenset(
    {
        (TransactionState.EMPTY, TransactionEvent.COMMITTED),
        (TransactionState.EMPTY, TransactionEvent.ABORTED),
        (TransactionState.EMPTY, TransactionEvent.MARKED),
        (TransactionState.ONGOING, TransactionEvent.INITIALISED),
        (TransactionState.ONGOING, TransactionEvent.MARKED),
        (TransactionState.ONGOING, TransactionEvent.EXPIRED),
        (TransactionState.PREPARE_COMMIT, TransactionEvent.INITIALISED),
        (TransactionState.PREPARE_COMMIT, TransactionEvent.GREW),
        (TransactionState.PREPARE_COMMIT, TransactionEvent.COMMITTED),
        (TransactionState.PREPARE_COMMIT, TransactionEvent.ABORTED),
        (TransactionState.PREPARE_COMMIT, TransactionEvent.EXPIRED),
        (TransactionState.PREPARE_ABORT, TransactionEvent.INITIALISED),
        (TransactionState.PREPARE_ABORT, TransactionEvent.GREW),
        (TransactionState.PREPARE_ABORT, TransactionEvent.COMMITTED),
        (TransactionState.PREPARE_ABORT, TransactionEvent.ABORTED),
        (TransactionState.PREPARE_ABORT, TransactionEvent.EXPIRED),
        (TransactionState.COMPLETE_COMMIT, TransactionEvent.COMMITTED),
        (TransactionState.COMPLETE_COMMIT, TransactionEvent.ABORTED),
        (TransactionState.COMPLETE_COMMIT, TransactionEvent.MARKED),
        (TransactionState.COMPLETE_ABORT, TransactionEvent.COMMITTED),
        (TransactionState.COMPLETE_ABORT, TransactionEvent.ABORTED),
        (TransactionState.COMPLETE_ABORT, TransactionEvent.MARKED),
        *((TransactionState.DEAD, event) for event in TransactionEvent),
    }
)
"""With NEXT, every pair: nothing is left undecided."""
