"""Partitions that a member has in part: which keys of them, beside its `Assignment`, which names them all.

An assignment names a partition that a member has in part like any other, and `Shares` says which keys of it. One
without an entry is whole. So a group whose members share nothing has no shares anywhere, in memory and in its records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias
from uuid import UUID

from anabranch.machines.groups.assignors.model import Assignment
from anabranch.machines.groups.records import SharedPartition
from anabranch.machines.key_ranges import (
    NONE,
    RANGES_IN_ALL_MAX,
    WHOLE,
    Ranges,
    WrongKeyRangesError,
    common,
    ranges_of,
    without,
)
from anabranch.machines.keyspace import SPACE, Interval
from anabranch.protocol.messages.consumer_group_heartbeat import KeyRange, PartitionKeyRanges

At: TypeAlias = tuple[UUID, int]
Shares: TypeAlias = tuple[tuple[At, Ranges], ...]
"""The keys of partitions that are had in part, ascending; no entry is empty or whole."""
NO_SHARES: Shares = ()


def shares_of(held: Mapping[At, Ranges]) -> Shares:
    """Make shares of what is had of partitions."""
    return tuple(sorted((at, ranges) for at, ranges in held.items() if ranges and ranges != WHOLE))


def held_of(at: At, partitions: Assignment, shares: Shares) -> Ranges:
    """What an assignment and its shares have of a partition."""
    for known, ranges in shares:
        if known == at:
            return ranges
    for topic_id, numbers in partitions:
        if topic_id == at[0] and at[1] in numbers:
            return WHOLE
    return NONE


def overlap(one: Assignment, one_shares: Shares, other: Assignment, other_shares: Shares) -> bool:
    """Whether two assignments have a key in common."""
    sets: dict[UUID, set[int]] = {}
    for topic_id, numbers in other:
        sets.setdefault(topic_id, set()).update(numbers)
    if not one_shares and not other_shares:
        return any(not sets.get(topic_id, set()).isdisjoint(numbers) for topic_id, numbers in one)
    mine, theirs = dict(one_shares), dict(other_shares)
    return any(
        common(mine.get((topic_id, number), WHOLE), theirs.get((topic_id, number), WHOLE))
        for topic_id, numbers in one
        for number in sets.get(topic_id, set()).intersection(numbers)
    )


def is_covered(one: Assignment, one_shares: Shares, other: Assignment, other_shares: Shares) -> bool:
    """Whether every key of the partitions of one, which are all in the other, is in the other."""
    if not one_shares and not other_shares:
        return True
    mine, theirs = dict(one_shares), dict(other_shares)
    return all(
        not without(mine.get((topic_id, number), WHOLE), theirs.get((topic_id, number), WHOLE))
        for topic_id, numbers in one
        for number in numbers
    )


# -- records and messages ----------------------------------------------------------------------------------------------


class TopicKeyRanges(Protocol):
    """Partitions of one topic in a message, with the ranges of those that are meant in part."""

    @property
    def topic_id(self) -> UUID: ...
    @property
    def partitions(self) -> Sequence[int]: ...
    @property
    def key_ranges(self) -> Sequence[PartitionKeyRanges]: ...


def shares_from(records: Iterable[SharedPartition]) -> Shares:
    """Read shares from a record."""
    return tuple(
        ((it.topic_id, it.partition), tuple(map(Interval, it.starts, it.ends))) for it in records if len(it.starts)
    )


def shared_partitions(shares: Shares) -> Sequence[SharedPartition]:
    """The shares as records have them."""
    return [
        SharedPartition(
            topic_id=topic_id,
            partition=partition,
            starts=[it.start for it in ranges],
            ends=[it.end for it in ranges],
        )
        for (topic_id, partition), ranges in shares
    ]


def shares_named(topics: Iterable[TopicKeyRanges]) -> Shares:
    """Read shares from a message. WrongKeyRangesError where ranges of a partition are no set of keys, or too many."""
    held: dict[At, Ranges] = {}
    count = 0
    for topic in topics:
        partitions = set(topic.partitions) if topic.key_ranges else ()
        for it in topic.key_ranges:
            if it.partition not in partitions:
                continue
            if len(it.ranges) == 1 and it.ranges[0].start == SPACE.start and it.ranges[0].end == SPACE.end:
                held.pop((topic.topic_id, it.partition), None)
                continue
            count += len(it.ranges)
            if count > RANGES_IN_ALL_MAX:
                raise WrongKeyRangesError(f"more than {RANGES_IN_ALL_MAX} ranges of keys are named in all")
            held[topic.topic_id, it.partition] = ranges_of((part.start, part.end) for part in it.ranges)
    return shares_of(held) if held else NO_SHARES


def key_ranges(topic_id: UUID, numbers: Iterable[int], shares: Mapping[At, Ranges]) -> list[PartitionKeyRanges]:
    """The shares of some partitions of a topic as messages have them.

    None are said where all are whole; otherwise there is an entry for each, in the order of the partitions.
    """
    listed = list(numbers)
    if not shares or not any((topic_id, number) in shares for number in listed):
        return []
    return [
        PartitionKeyRanges(
            partition=number,
            ranges=[KeyRange(start=it.start, end=it.end) for it in shares.get((topic_id, number), NONE)],
        )
        for number in listed
    ]
