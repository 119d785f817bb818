"""The input and output of a planner: plain values, no NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from uuid import UUID

Assignment: TypeAlias = tuple[tuple[UUID, tuple[int, ...]], ...]
"""A member's partitions by topic id: topics in the order of their names, partitions ascending, no topic empty."""


class Topic(Protocol):
    """A topic as the metadata has it; a new object whenever anything in it changed."""

    @property
    def topic_id(self) -> UUID: ...

    @property
    def name(self) -> str: ...

    @property
    def partitions(self) -> Sequence[int]:
        """The live partitions, ascending."""

    @property
    def retiring(self) -> Sequence[int]:
        """Partitions that are read until they are empty, ascending; balanced as a list of their own."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """The input of an assignor for one member; racks are ignored, as the assignors of Apache Kafka 4 do.

    The object's identity is its version: keep it while nothing changes, replace it when something does.
    """

    topics: frozenset[str]
    """Names, those that a regex matches now included; a name that is no topic counts for nothing."""
    instance_id: str | None = None
