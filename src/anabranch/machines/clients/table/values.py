"""The values of a table: pieces of the key space, loads, changes that are not flushed, and the errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.machines.keyspace import Interval


class KeyNotOwnedError(AnabranchError):
    """The key's entry is not in this table: another member owns the key, or nobody does at this time."""


class KeyLoadingError(KeyNotOwnedError):
    """The key's entry is being loaded."""


@dataclass(slots=True, eq=False)
class Piece:
    """Keys of one partition whose entries are in memory, or are being loaded."""

    partition: TopicPartition
    interval: Interval
    layout: int
    """The layout up to which it is known that nobody else had these keys."""
    ready: bool = False
    values: dict[bytes, bytes] = field(default_factory=dict)
    """What the changelog holds."""
    behind: dict[bytes, bytes] = field(default_factory=dict)
    """Entries from before the piece became smaller that have not been looked through."""


class Load(NamedTuple):
    """Read these keys of a partition of the changelog, as of now or later, into a piece."""

    family: int
    piece: Piece


class Change(NamedTuple):
    """A value that was put, None for a deletion. The commit of offset `mark`, or a higher one, covers its record."""

    mark: int
    value: bytes | None


class Changes:
    """The changes of one key that are not flushed, in order; the first `sending` of them are being flushed."""

    __slots__ = ("all", "sending")

    def __init__(self) -> None:
        self.all: list[Change] = []
        self.sending = 0


class Write(NamedTuple):
    """A record for the changelog; None deletes."""

    partition: TopicPartition
    key: bytes
    value: bytes | None
    changes: Changes


def without(wanted: Iterable[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return the places of `wanted` that lie in no interval of `taken`; ascending, joined where they touch."""
    found: list[Interval] = []
    for start, end in sorted(wanted):
        if found:
            start = max(start, found[-1].end + 1)
        for one in sorted(taken):
            if one.end < start or one.start > end:
                continue
            if one.start > start:
                _join(found, Interval(start, one.start - 1))
            start = one.end + 1
        if start <= end:
            _join(found, Interval(start, end))
    return found


def _join(found: list[Interval], more: Interval) -> None:
    if found and found[-1].end + 1 == more.start:
        more = Interval(found.pop().start, more.end)
    found.append(more)
