"""The commits in transactions that wait for gaps below them to be closed (the purgatory; `transaction_ranges`).

A request waits whether its client still does or not, until its transaction ends at the latest. So what waits counts
among the committed offsets of the broker (`offsets.max.bytes`), and a request without room there is refused. So is one
of a group of which many wait: each look at them takes time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from anabranch.base.memory import text_size
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest

REQUEST_SIZE = 1_000
PARTITION_SIZE = 400
RANGE_SIZE = 120
"""Bytes of memory of a request, of each of its partitions, and of each of their ranges."""

GROUP_MAX = 100
"""Requests of one group that wait."""


class Waiting(NamedTuple):
    """A request that waits."""

    ticket: Hashable
    request: TxnOffsetCommitRequest


class Purgatory:
    """The requests of a shard that wait, by group."""

    def __init__(self) -> None:
        self._by_group: dict[str, list[Waiting]] = {}
        self.size = 0
        """Bytes of memory that they take."""

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._by_group

    @property
    def groups(self) -> Collection[str]:
        """The groups with requests that wait."""
        return self._by_group.keys()

    def of(self, group_id: str) -> Sequence[Waiting]:
        """The requests of a group, oldest first."""
        return self._by_group.get(group_id, ())

    def is_full(self, group_id: str) -> bool:
        """Whether no further request of a group may wait."""
        return len(self.of(group_id)) >= GROUP_MAX

    def add(self, waiting: Waiting) -> None:
        """Let a request wait."""
        self._by_group.setdefault(waiting.request.group_id, []).append(waiting)
        self.size += size_of(waiting.request)

    def remove(self, waiting: Waiting) -> None:
        """Let a request wait no more."""
        group_id = waiting.request.group_id
        its = self._by_group[group_id]
        its.remove(waiting)
        self.size -= size_of(waiting.request)
        if not its:
            del self._by_group[group_id]


def size_of(request: TxnOffsetCommitRequest) -> int:
    """Return the bytes of memory that a request takes while it waits."""
    texts = text_size(request.group_id) + text_size(request.member_id) + text_size(request.transactional_id)
    parts = [part for topic in request.topics for part in topic.partitions]
    ranges = sum(len(part.offset_ranges) + len(part.key_range_offsets) for part in parts)
    metadata = sum(text_size(part.committed_metadata or "") for part in parts)
    names = sum(text_size(topic.name) for topic in request.topics)
    return REQUEST_SIZE + texts + names + metadata + PARTITION_SIZE * len(parts) + RANGE_SIZE * ranges
