"""Ranges of commits as requests and answers have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from anabranch.machines.groups import ranged_commits, shares
from anabranch.machines.groups.individual import Range
from anabranch.machines.groups.ranged_commits import RangedCommit
from anabranch.machines.groups.shared_commits import OFFSET_OF_SHARE
from anabranch.machines.groups.shares import KeyRange
from anabranch.machines.lineage import Frontier
from anabranch.protocol.messages.offset_commit import KeyRangeOffset, OffsetCommitRequestPartition, OffsetRange
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequestPartition


class Ranges(Sequence[OffsetRange]):
    """Ranges as an answer has them: 100,000 of them become objects in the thread that encodes the answer."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[OffsetRange]:
        return (OffsetRange(start=start, end=end) for start, end in self._ranges)

    @overload
    def __getitem__(self, at: int) -> OffsetRange: ...

    @overload
    def __getitem__(self, at: slice) -> Ranges: ...

    def __getitem__(self, at: int | slice) -> OffsetRange | Ranges:
        if isinstance(at, slice):
            return Ranges(self._ranges[at])
        start, end = self._ranges[at]
        return OffsetRange(start=start, end=end)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class KeyRanges(Sequence[KeyRangeOffset]):
    """The next offset by key as an answer has it: objects are made where the answer is encoded."""

    def __init__(self, frontier: Frontier) -> None:
        self._frontier = frontier

    def __len__(self) -> int:
        return len(self._frontier.starts)

    def __iter__(self) -> Iterator[KeyRangeOffset]:
        return (_key_range(it) for it in shares.shares(self._frontier))

    @overload
    def __getitem__(self, at: int) -> KeyRangeOffset: ...

    @overload
    def __getitem__(self, at: slice) -> list[KeyRangeOffset]: ...

    def __getitem__(self, at: int | slice) -> KeyRangeOffset | list[KeyRangeOffset]:
        found = shares.shares(self._frontier)[at]
        return _key_range(found) if isinstance(found, tuple) else [_key_range(it) for it in found]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def _key_range(found: KeyRange) -> KeyRangeOffset:
    start, end, offset = found
    return KeyRangeOffset(start=start, end=end, offset=offset)


def commit_of(part: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition, log_start: int) -> RangedCommit:
    """Read a commit by ranges. WrongRangesError, with a sentence, where its ranges cannot be."""
    return ranged_commits.checked(
        part.committed_offset if part.committed_offset >= 0 else log_start,
        [(it.start, it.end) for it in part.offset_ranges],
        [(it.start, it.end, it.offset) for it in part.key_range_offsets],
        part.committed_leader_epoch,
        part.committed_metadata or "",
        is_plain=part.committed_offset == OFFSET_OF_SHARE,
    )
