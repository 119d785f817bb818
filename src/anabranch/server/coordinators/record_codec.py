"""The seams between a shard and its machine: what a machine can do, and how its records are written and read.

Beside the translation of records a codec has what a shard must know of a machine and cannot decide: what loading may
put off, and how much a decision looks at (`Shard.ask`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from anabranch.machines.outcome import Outcome

RecordT = TypeVar("RecordT")
Taken = TypeVar("Taken", contravariant=True)


class Machine(Protocol[Taken]):
    """The pure machine of a shard: reads no clock and does no I/O."""

    def apply(self, record: Taken, *, producer_id: int = -1) -> None:
        """Fold a record; one with a producer id is pending until that producer's marker."""

    def apply_marker(self, producer_id: int, producer_epoch: int, committed: bool) -> None:
        """End a producer's transaction: its pending records count from now on, or never."""

    def loaded(self, now_ms: int) -> Outcome[None, Any]:
        """Handle the end of loading: set timers, and do the overdue work."""

    def on_timer(self, key: Any, now_ms: int) -> Outcome[None, Any]:
        """Decide as the timer of `key` is due."""


class RecordCodec(NamedTuple, Generic[RecordT]):
    """Translates records to keys and values and back; `decode` returns None for unknown kinds."""

    encode: Callable[[RecordT], tuple[bytes, bytes | None]]
    decode: Callable[[bytes, bytes | None], RecordT | None]
    make_index: Callable[[], Any] | None = None
    """Make a `bulk_replay.Index` of records that a machine need not apply when it is loaded from a large log."""
    adopt: Callable[[Any, Any], None] | None = None
    """Give that index to the machine."""
    catch_up: Callable[[Any], bool] | None = None
    """Have the machine apply a millisecond's worth of the index's records; return whether more are left."""
    marked: Callable[[Any, int, int], Outcome[None, RecordT]] | None = None
    """What the machine decides after a marker is applied, by the producer id and the time."""
    after_marker: Hashable | None = None
    """The timer that is due after that."""
    timer_weight: Callable[[Any, Any], int] | None = None
    """How much the machine looks at when a timer rings, by its key; `ON_LOOP_MAX` at most is decided on the loop."""
    marker_weight: Callable[[Any, int], int] | None = None
    """How much of a producer is pending: what its marker decides."""
    loaded_weight: Callable[[Any], int] | None = None
    """How much the machine looks at when it is loaded."""
    is_beside: Callable[[RecordT], bool] | None = None
    """Whether a record is one of the second log; None where there is none."""
    beside_empty: Callable[[Any], None] | None = None
    """Tell the machine, before `loaded`, that its second log has never had a record, as far as can be seen."""


class Encoded(NamedTuple):
    """The records of an outcome as they are written."""

    beside: Sequence[tuple[bytes, bytes | None]]
    batch: bytearray | None


def apply_outcome(machine: Machine[RecordT], outcome: Outcome[Any, RecordT]) -> None:
    """Fold the records of an outcome."""
    producer_id, _ = outcome.producer or (-1, -1)
    for record in outcome.records:
        machine.apply(record, producer_id=producer_id)
