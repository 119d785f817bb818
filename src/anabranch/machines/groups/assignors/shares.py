"""Shares: with more willing members than partitions, partitions take members and cut their interval (keyspace.md, 5).

The assignment turns round, as the proposal says: every partition of a topic takes some of the members, and its keys are
cut into as many ranges. `uniform` deals the partitions' places to the members in turn, `range` in consecutive runs.

    5 members, 3 partitions      uniform: p0 M1 M4 | p1 M2 M5 | p2 M3      range: p0 M1 M2 | p1 M3 M4 | p2 M5

The rules, for every list of partitions (live and retiring ones are two lists):
- the ranges of a partition tile the key space; so every key has exactly one owner, also one that a foreign partitioner
  has put into the partition. Cut points lie inside the partition's interval;
- a member has one range, in one partition; the numbers of two partitions' sharers differ by one at most;
- without a measured load the ranges of a partition are equally large; with one, `uniform` makes them carry equal load,
  and leaves those of unchanged sharers where they are until that is worth a move (ADR 0055). `range` cuts evenly
  always, so that topics of equal size are cut alike;
- `uniform` is sticky: a member stays in its partition while there is room, members keep the order of their ranges, and
  one that comes is put where the others keep most. So a join or leave moves less than half of one partition's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, size
from anabranch.machines.keyspace import SPACE, Interval, cuts, cuts_by_load

Held: TypeAlias = Mapping[int, Ranges]
"""What a member has of one topic: by partition its keys."""
Loads: TypeAlias = Callable[[int], Sequence[float]]
"""By partition the load that was measured in equal parts of its interval, ascending; empty where none was."""


class Shared(NamedTuple):
    """A list of partitions to be shared."""

    intervals: Mapping[int, Interval]
    """The partitions, ascending, each with the interval that it holds now."""
    members: Sequence[str]
    """The members that take part, in the group's order."""
    held: Mapping[str, Held]
    """What members have in the present target."""
    sharers_max: int
    """How many members a partition has at most; further ones get nothing."""
    loads: Loads = lambda _: ()


IMBALANCE_MAX = 1.5
"""Cuts stay while no share has more than this multiple of the mean load,"""
WORTH_A_MOVE = 0.8
"""or new cuts would not bring it below this part of what it has."""
PARTITIONS_BY_LOAD_MAX = 32
"""The partitions of a group that shares more are cut evenly: a decision has its time."""


Divided: TypeAlias = dict[str, dict[int, Ranges]]
"""By member what it gets: a member without anything has no entry."""


def divide_in_turn(shared: Shared) -> Divided:
    """Share partitions as `uniform` does. There are at least as many members as partitions."""
    partitions, held = list(shared.intervals), shared.held
    members = _admitted(shared)
    staying = _staying(shared, members)
    least, more = divmod(len(members), len(partitions))
    # The places beyond an even number go to the partitions that have most members already.
    by_size = sorted(partitions, key=lambda partition: -len(staying[partition]))
    room = {partition: least + (number < more) for number, partition in enumerate(by_size)}
    kept = {partition: staying[partition][: room[partition]] for partition in partitions}
    placed = {member for sharers in kept.values() for member in sharers}
    coming: dict[int, list[str]] = {partition: [] for partition in partitions}
    emptiest = [(len(kept[it]), number, it) for number, it in enumerate(partitions) if len(kept[it]) < room[it]]
    heapify(emptiest)
    for member in members:
        if member not in placed:
            count, number, taker = heappop(emptiest)
            coming[taker].append(member)
            if count + 1 < room[taker]:
                heappush(emptiest, (count + 1, number, taker))
    found: Divided = {}
    for partition in partitions:
        order = sorted(kept[partition], key=lambda member: held[member][partition][0].start)
        for member in coming[partition]:
            order.insert(_best_place(order, partition, held, shared.intervals[partition]), member)
        present = [held.get(member, {}).get(partition, NONE) for member in order]
        _give(partition, order, _cut(shared.intervals[partition], shared.loads(partition), present), found)
    return found


def divide_in_runs(shared: Shared) -> Divided:
    """Share partitions as `range` does: in the order of the members, whatever they have."""
    partitions = list(shared.intervals)
    members = shared.members[: len(partitions) * shared.sharers_max]
    least, more = divmod(len(members), len(partitions))
    found: Divided = {}
    begin = 0
    for number, partition in enumerate(partitions):
        end = begin + least + (number < more)
        sharers = members[begin:end]
        _give(partition, sharers, cuts(shared.intervals[partition], len(sharers)), found)
        begin = end
    return found


def deal_whole(partitions: Sequence[int], members: Sequence[str], held: Mapping[str, Held]) -> Divided:
    """Give partitions whole: to the members that have most of them, as evenly as can be, and in turn."""
    found: Divided = {}
    if not members:
        return found
    most = -(-len(partitions) // len(members))
    left = []
    for partition in partitions:
        has = [member for member in members if held.get(member, {}).get(partition)]
        owner = max(has, key=lambda member: size(held[member][partition]), default=None)
        if owner is None or len(found.get(owner, ())) >= most:
            left.append(partition)
        else:
            found.setdefault(owner, {})[partition] = WHOLE
    for partition in left:
        owner = min(members, key=lambda member: len(found.get(member, ())))
        found.setdefault(owner, {})[partition] = WHOLE
    return found


def _admitted(shared: Shared) -> Sequence[str]:
    """The members that take part: of too many those that have something already, then the first ones."""
    most = len(shared.intervals) * shared.sharers_max
    if len(shared.members) <= most:
        return shared.members
    has = {member for member in shared.members if any(map(shared.intervals.__contains__, shared.held.get(member, ())))}
    chosen = set(sorted(shared.members, key=lambda member: member not in has)[:most])
    return [member for member in shared.members if member in chosen]


def _staying(shared: Shared, members: Sequence[str]) -> dict[int, list[str]]:
    """By partition the members that may stay in it: those that have most of its interval come first.

    A member that has keys of several partitions, as before there were so many members, stays in one.
    """
    has: dict[int, dict[str, int]] = {partition: {} for partition in shared.intervals}
    for member in members:
        mine = shared.held.get(member, {})
        if any(map(shared.intervals.__contains__, mine)):
            home = _home(mine, shared)
            has[home][member] = size(common(mine[home], (shared.intervals[home],)))
    return {partition: sorted(each, key=lambda member: -each[member]) for partition, each in has.items()}


def _home(mine: Held, shared: Shared) -> int:
    """The partition of which a member has most; the first of several."""
    inside = {
        partition: size(common(ranges, (shared.intervals[partition],)))
        for partition, ranges in mine.items()
        if partition in shared.intervals
    }
    return max(inside, key=lambda partition: inside[partition])


def _best_place(order: Sequence[str], partition: int, held: Mapping[str, Held], interval: Interval) -> int:
    """Where a member is best put between others: they keep most of what they have then. The last of several."""
    has = [held.get(member, {}).get(partition, NONE) for member in order]
    if not any(has):
        return len(order)
    shares = cuts(interval, len(order) + 1)
    before = [size(common(ranges, (share,))) for ranges, share in zip(has, shares, strict=False)]
    behind = [size(common(ranges, (share,))) for ranges, share in zip(has, shares[1:], strict=False)]
    kept = sum(behind)
    best, most = 0, kept
    for place in range(1, len(order) + 1):
        kept += before[place - 1] - behind[place - 1]
        if kept >= most:
            best, most = place, kept
    return best


def imbalance(interval: Interval, loads: Sequence[float], shares: Sequence[Ranges]) -> float:
    """Return the load of the share that has most, as a multiple of the mean; 1 without any load.

    `loads` are those of equal parts of the partition's interval, ascending.
    """
    below = [0.0, *accumulate(max(0.0, load) for load in loads)]
    if not below[-1]:
        return 1.0
    found = [
        sum(_load_below(it.end + 1, interval, below) - _load_below(it.start, interval, below) for it in ranges)
        for ranges in shares
    ]
    return max(found) * len(found) / below[-1]


def _load_below(place: int, interval: Interval, below: Sequence[float]) -> float:
    """The load of the places before one; `below`: that of all parts before each part, and of all."""
    parts = len(below) - 1
    part, within = divmod((min(max(place, interval.start), interval.end + 1) - interval.start) * parts, interval.size)
    return below[-1] if part == parts else below[part] + (below[part + 1] - below[part]) * (within / interval.size)


def is_worth_a_move(interval: Interval, loads: Sequence[float], present: Sequence[Ranges]) -> bool:
    """Whether the load of sharers is so uneven that their cuts should be others."""
    now = imbalance(interval, loads, present)
    if now <= IMBALANCE_MAX:
        return False
    others = [(share,) for share in cuts_by_load(interval, loads, len(present))]
    return imbalance(interval, loads, others) <= WORTH_A_MOVE * now


def _cut(interval: Interval, loads: Sequence[float], present: Sequence[Ranges]) -> list[Interval]:
    """Cut a partition for its sharers, ascending in this order. `present`: what each has of it, NONE for those new."""
    if any(loads) and _are_cuts(present) and not is_worth_a_move(interval, loads, present):
        return [ranges[0] for ranges in present]
    return cuts_by_load(interval, loads, len(present))


def _are_cuts(present: Sequence[Ranges]) -> bool:
    """Whether each has one range, and together, in this order, they are the key space."""
    if any(len(ranges) != 1 for ranges in present):
        return False
    follow = all(one[0].end + 1 == other[0].start for one, other in pairwise(present))
    return follow and present[0][0].start == SPACE.start and present[-1][0].end == SPACE.end


def _give(partition: int, sharers: Sequence[str], shares: Sequence[Interval], found: Divided) -> None:
    for member, share in zip(sharers, shares, strict=True):
        found.setdefault(member, {})[partition] = (share,)
