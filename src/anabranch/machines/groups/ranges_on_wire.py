"""Ranges of commits as requests and answers have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from anabranch.machines.groups import ranged_commits
from anabranch.machines.groups.individual import Range
from anabranch.machines.groups.ranged_commits import RangedCommit
from anabranch.protocol.messages.offset_commit import OffsetCommitRequestPartition, OffsetRange
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


def commit_of(part: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition, log_start: int) -> RangedCommit:
    """Read a commit by ranges. WrongRangesError, with a sentence, where its ranges cannot be."""
    return ranged_commits.checked(
        part.committed_offset if part.committed_offset >= 0 else log_start,
        [(it.start, it.end) for it in part.offset_ranges],
        [(it.start, it.end, it.offset) for it in part.key_range_offsets],
        part.committed_leader_epoch,
        part.committed_metadata or "",
    )
