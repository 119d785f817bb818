"""The seam between a consumer and state that is kept beside it (`client.table`).

Records are handed out once their keys' state is in memory, and offsets are committed together with the changes that
their records made, in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Protocol

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.listeners import GroupMetadata
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.client.consumer.record import Record
from anabranch.machines.clients.fetching import Deliverable
from anabranch.machines.clients.key_ranges import KeyRanges


def always() -> None:
    """Check nothing: what is committed is held."""


class KeptState(Protocol):
    """State by key, of one consumer."""

    def is_of(self, topic: str) -> bool:
        """Whether some state is of the keys of a topic."""

    def admit(self, parts: list[Deliverable]) -> list[Deliverable]:
        """Return the parts whose keys' state is in memory, and begin to load that of others. Raises its errors."""

    def released(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the state of partitions that were revoked or lost, and what is not flushed of it."""

    def narrowed(self, tp: TopicPartition, keys: KeyRanges) -> None:
        """Drop the state of ranges of a partition's keys that were revoked, and what is not flushed of it."""

    def undo(self, record: Record) -> None:
        """Undo the changes that were made for a record that is not finished."""

    @property
    def is_due(self) -> bool:
        """Whether state waits for a commit."""

    def unflushed(self) -> set[TopicPartition]:
        """Return the partitions with changes that are not flushed."""

    async def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: GroupMetadata,
        check_held: Callable[[], None] = always,
    ) -> None:
        """Commit offsets with the changes of the records before them, in one transaction; raise if it was refused.

        `check_held` raises if keys were dropped since these offsets were said: their changes are gone.
        """

    async def attend(self) -> None:
        """Commit when due, for a consumer without a group; called while the application polls."""

    async def flush(self) -> None:
        """Commit what was processed by a consumer without a group, at its end."""

    async def close(self) -> None:
        """End all loads, and close connections."""


current_record: ContextVar[Record | None] = ContextVar("current_record", default=None)
"""The record that the current task, or thread, works on in `run`."""
