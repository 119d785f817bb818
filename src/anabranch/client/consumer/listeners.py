"""The values of a subscription: patterns, rebalance listeners, and the member's identity."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from anabranch.base.ids import TopicPartition
from anabranch.machines.keyspace import Interval


class SubscriptionPattern(NamedTuple):
    """A subscription to all topics with a name that an RE2 regular expression matches in full."""

    pattern: str


class GroupMetadata(NamedTuple):
    """The identity of this consumer in its group; a transaction that commits its offsets needs it."""

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None


KeyRange = Interval
"""Places of the key space, `start` to `end`, both inclusive (docs/hashing.md)."""
Shares = dict[TopicPartition, tuple[KeyRange, ...]]
"""What listeners are given with `allow_key_share`: partitions with their ranges of keys; none: the whole partition."""


class RebalanceListener:
    """Called in `poll` on assignment, revocation and loss of partitions. Methods are optional, plain or `async`.

    With `allow_key_share` the partitions are `Shares`: those of which ranges are assigned, revoked or lost, and which.
    A partition of which other ranges stay assigned is among them, too.
    """

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Handle newly assigned partitions; `seek` may set where they begin."""

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Handle the revocation of these partitions; their processed records can still be committed."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Handle lost partitions: other members may own them, and commits fail. Default: as if revoked."""
        return self.on_partitions_revoked(partitions)


class PartitionKeyRebalanceListener:
    """Called in `poll` where keys may move between partitions (KIP-253). Methods are optional, plain or `async`.

    For applications with state by key: what one member flushes before its records of a key are committed, another
    member, or the same one, loads before it is given the key's next records from another partition. Called for topics
    with `enable.ordered.delivery` only.

    With `allow_key_share`, ranges of keys move between members, too. The partitions are then `Shares`, of all topics:
    what arrives is announced after every assignment, and flushes are asked for before every automatic commit.
    """

    def on_partition_key_maybe_revoked(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Flush the state of these partitions' keys: their next records may be given to another member.

        Called before automatic commits, and, where commits are the application's, when gates may wait for one.
        """

    def on_partition_key_assigned(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Load the state of keys that were moved into these partitions: all their earlier records are committed."""


@dataclass(frozen=True, slots=True)
class _Functions:
    """A listener made of functions."""

    on_partitions_assigned: Callable[..., Any] | None
    on_partitions_revoked: Callable[..., Any] | None
    on_partitions_lost: Callable[..., Any] | None


def listener_of(
    listener: Any,
    assigned: Callable[..., Any] | None,
    revoked: Callable[..., Any] | None,
    lost: Callable[..., Any] | None,
) -> Any:
    """Return one listener, from an object or from functions."""
    if assigned is None and revoked is None and lost is None:
        return listener
    if listener is not None:
        raise ValueError("give subscribe a listener, or functions, not both")
    return _Functions(assigned, revoked, lost)


in_callback: ContextVar[bool] = ContextVar("in_callback", default=False)
"""Whether the current task, or thread, runs a listener."""
Invoke = Callable[[Callable[..., Any], tuple[Any, ...]], Awaitable[None]]


async def invoke_here(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a plain or an async function."""
    result = function(*arguments)
    if inspect.isawaitable(result):
        await result
