"""What an application gives and is given when it subscribes: patterns, rebalance listeners, the member's identity."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from anabranch.base.ids import TopicPartition


class SubscriptionPattern(NamedTuple):
    """Topics whose whole name matches an RE2 regular expression; matched by the group's coordinator."""

    pattern: str


class GroupMetadata(NamedTuple):
    """The identity of this consumer in its group; a transaction that commits its offsets needs it."""

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None


class RebalanceListener:
    """Called when partitions come and go, in `poll`. Methods may be plain or `async`; override what you need."""

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Take these in addition; `seek` now decides where to begin."""

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Let go of these; work on them can still be committed."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """These may be others' already; nothing of them can be committed. By default as if they were revoked."""
        return self.on_partitions_revoked(partitions)


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
    """One listener, from an object or from functions."""
    if assigned is None and revoked is None and lost is None:
        return listener
    if listener is not None:
        raise ValueError("give subscribe a listener, or functions, not both")
    return _Functions(assigned, revoked, lost)


in_callback: ContextVar[bool] = ContextVar("in_callback", default=False)
"""Whether this is the task, or the thread, of a rebalance listener."""
Invoke = Callable[[Callable[..., Any], tuple[Any, ...]], Awaitable[None]]


async def invoke_here(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a plain or an async function."""
    result = function(*arguments)
    if inspect.isawaitable(result):
        await result
