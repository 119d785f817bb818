"""Shares of a group's member: ranges of a partition that come and go while the others are read on (cooperative.md, 3).

A partition has one position, also where the group is further with some of the member's keys than with others, as after
a hand-over: the position is then the lowest, and a *floor* says by key where to go on. Below their floor, keys are not
asked for; a fetch ends where one more key is to be asked for. So

- a range that is taken away is asked for no longer, and what was fetched is fetched again without it;
- a range that is added begins where the group is in it. If that lies behind, the position goes back, and the other
  keys go on at their floor, which is the position that they had;
- of each key, records are handed out once, and in order.

`done` says the same of what is processed, for commits: each range is committed at the position, or at its `done`.

Where the log does not begin before some keys' next offset any more, or ends before it, `auto.offset.reset` is for these
keys (`sought`) alone: the others go on where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.machines.clients.fetching.state import FetchingState, Partition
from anabranch.machines.clients.key_ranges import (
    NOWHERE,
    KeyRanges,
    Piece,
    at_least,
    frontier_of,
    lowest,
    pieces,
    places,
    raised,
    set_to,
    share,
)
from anabranch.machines.key_ranges import joined, union, without
from anabranch.machines.keyspace import SPACE, Interval
from anabranch.machines.lineage import Frontier


def add(state: FetchingState, partition: Partition, keys: KeyRanges) -> None:
    """Add ranges to a granted partition. They are read once it is known where the group is in them."""
    partition.arrivals = state.new_id()
    if partition.awaiting:
        partition.share = share(union(partition.share, keys))
        partition.ask(state.filter)
    else:
        partition.arriving = union(partition.arriving, keys)


def take(state: FetchingState, partition: Partition, keys: KeyRanges) -> bool:
    """Take ranges away; return False if nothing is left."""
    partition.arriving = without(partition.arriving, keys)
    rest = without(places(partition.share), keys)
    if not rest:
        if not partition.arriving:
            return False
        partition.forget()
        partition.position, partition.floor, partition.done = None, None, None
        partition.awaiting, partition.share, partition.arriving = True, share(partition.arriving), ()
        partition.ask(state.filter)
        return True
    partition.share = share(rest)
    _go_to_floor(partition, rest)
    partition.ask(state.filter)
    return True


def _go_to_floor(partition: Partition, keys: KeyRanges) -> None:
    """Pass over what none of the keys is read in. The member has begun where it has: others are to read that."""
    if partition.position is not None and partition.floor is not None:
        first, began, handed_end = lowest(partition.floor, keys), partition.start, partition.handed_end
        if first > partition.position:
            partition.held.clear()
            partition.held_size = 0
            partition.stand(first)
            partition.start, partition.handed_end = began, handed_end


def begin(partition: Partition, steps: Sequence[Piece], offset: int) -> int:
    """Set the floor of a partition that begins; return the position. `steps`: where the group is, by key, or none."""
    partition.floor = partition.done = frontier_of(steps) if steps else None
    return offset if partition.floor is None else lowest(partition.floor, places(partition.share))


def arrive(
    state: FetchingState, partition: Partition, offset: int | None, steps: Sequence[Piece], processed: int
) -> None:
    """Read the ranges that were added. `processed`: the offset below which all of the other keys is processed.

    `offset`, and by key `steps`: where the group is; None where it has committed nothing, and the member's first
    position counts.
    """
    keys, partition.arriving = partition.arriving, ()
    had, position = places(partition.share), partition.position
    partition.share = share(union(had, keys))
    start = partition.start if offset is None else offset
    if partition.gone is not None or partition.passed is not None:
        own = partition.gone or raised(partition.done or NOWHERE, had, processed if position is None else position)
        told = partition.passed or frontier_of(steps, outside=start or 0)
        partition.gone = set_to(own, keys, pieces(told, keys))
    if position is None and start is not None:  # Where the others begin is being looked up.
        steps = pieces(frontier_of(steps, outside=start), keys)
        partition.sought = without(partition.sought or had, keys)
        partition.floor = set_to(partition.floor or NOWHERE, keys, steps)
        partition.done = set_to(partition.done or NOWHERE, keys, steps)
    elif position is not None and start is not None:
        steps = pieces(frontier_of(steps, outside=start), keys)
        partition.floor = set_to(raised(partition.floor or NOWHERE, had, position), keys, steps)
        partition.done = set_to(raised(partition.done or NOWHERE, had, processed), keys, steps)
        partition.held.clear()
        partition.held_size = 0
        partition.stand(lowest(partition.floor, places(partition.share)))
    partition.ask(state.filter)
    partition.topic.limits = None


def reset(partition: Partition, log_start: int) -> None:
    """Have a partition's position looked up, for the keys whose next offset is not in the log.

    `log_start`: where the log begins; -1 if unknown.
    """
    position, floor, done = partition.position, partition.floor, partition.done
    partition.forget()
    partition.position, partition.sought = None, ()
    if floor is None or position is None or position >= log_start >= 0:
        partition.done = partition.floor = partition.gone = None
        return
    ranges = places(partition.share)
    kept = [Interval(start, end) for start, end, at in pieces(floor, ranges) if at >= max(position + 1, log_start)]
    partition.sought = without(ranges, joined(kept))
    partition.floor, partition.done = floor, raised(done or NOWHERE, ranges, position)


def found(partition: Partition, offset: int) -> int:
    """Take an offset that was looked up for the keys that are sought; return the position."""
    keys, partition.sought = partition.sought, ()
    if not keys:
        partition.gone = None
        return offset
    step = [(start, end, offset) for start, end in keys]
    if partition.gone is not None:
        partition.gone = set_to(partition.gone, keys, step)
    partition.floor = set_to(partition.floor or NOWHERE, keys, step)
    partition.done = set_to(partition.done or NOWHERE, keys, step)
    return lowest(partition.floor, places(partition.share))


def restart(partition: Partition, offset: int) -> None:
    """Go back to an offset below which all is processed; what is processed above it is not read again."""
    partition.floor = partition.done
    partition.forget()
    partition.stand(offset)


def passed(partition: Partition, steps: Sequence[Piece], *, by_owner: bool) -> None:
    """Note how far owners of keys are, before what is committed is; or that only what others have finished is."""
    if partition.passed is not None and by_owner:
        for start, end, offset in steps:
            partition.passed = raised(partition.passed, (Interval(start, end),), offset)
    elif partition.passed is None and not by_owner:
        partition.passed = stands(partition)


def stands(partition: Partition) -> Frontier:
    """The group's committed offsets by key, as far as they are known."""
    return partition.committed_by_key or frontier_of((), outside=partition.committed or 0)


def committed(partition: Partition, found: Sequence[Piece], outside: int | None, *, by_owner: bool = True) -> None:
    """Note committed offsets by key. `outside`: the offset of all other keys; None: as before."""
    passed(partition, found, by_owner=by_owner)
    if outside is None:
        ranges = joined((Interval(start, end) for start, end, _ in found))
        partition.committed_by_key = set_to(stands(partition), ranges, found)
    else:
        partition.committed_by_key = frontier_of(found, outside)
    at = lowest(partition.committed_by_key, (SPACE,))
    if partition.committed is not None and at < partition.committed:
        rewound(partition)
    partition.committed = at
    partition.topic.limits = None


def committed_whole(partition: Partition, offset: int, *, by_owner: bool) -> None:
    """Note a committed offset, of all keys.

    To commit where the group stands already does not say that an owner has come there, as for the coordinator.
    """
    if partition.committed is not None and offset < partition.committed:
        rewound(partition)
        partition.committed_by_key = None
        if by_owner:
            partition.passed = partition.gone = None
    if not by_owner or offset != partition.committed:
        passed(partition, [(SPACE.start, SPACE.end, offset)], by_owner=by_owner)
    if partition.committed_by_key is not None:
        partition.committed_by_key = at_least(partition.committed_by_key, offset)
    partition.committed = offset
    partition.topic.limits = None


def rewound(partition: Partition) -> None:
    """Forget what was told, of this partition and of others, when the group was further: gates are decided anew."""
    partition.told = None
    partition.topic.elsewhere.clear()


def processed(partition: Partition, offset: int) -> list[Piece]:
    """The next offsets to commit, by key, when everything is processed below `offset`; none of a whole partition."""
    ranges = places(partition.share)
    found = pieces(raised(partition.done or NOWHERE, ranges, offset), ranges)
    if partition.gone is not None:
        return _come_to(partition.gone, found)
    return found if partition.share or len(found) > 1 else []


def went(partition: Partition, offset: int) -> None:
    """Note that records were handed out up to an offset, so that the gates of all its keys are open to there."""
    ranges = places(partition.share)
    assert partition.gone is not None
    partition.gone = raised(partition.gone, ranges, offset)
    steps = pieces(raised(partition.done or NOWHERE, ranges, offset), ranges)
    if all(lowest(partition.gone, (Interval(start, end),)) >= at for start, end, at in steps):
        partition.gone = None


def _come_to(gone: Frontier, steps: Iterable[Piece]) -> list[Piece]:
    """The keys of some steps that this member has come with to where these say."""
    return [
        (start, end, at) for one, two, at in steps for start, end, to in pieces(gone, (Interval(one, two),)) if to >= at
    ]


def said(partition: Partition, offset: int) -> list[Piece]:
    """The same when the application says so by an offset: it speaks of the records below it that it was handed.

    Of keys that arrived that may be fewer than below the offset. Of keys that it was handed more of before, it says no
    more than the offset, and what the group has committed stays.
    """
    position, known = partition.position, partition.floor or partition.done
    if partition.gone is not None and not partition.share and offset < (partition.committed or 0):
        return []  # A rewind, of all keys.
    if position is None or known is None:
        return processed(partition, offset)
    ranges = places(partition.share)
    handed = pieces(raised(known, ranges, position), ranges)
    catches_up = any(at > position for _, _, at in handed)
    found = frontier_of((), outside=partition.start or 0) if partition.committed is None else stands(partition)
    for start, end, at in handed:
        found = raised(found, (Interval(start, end),), min(offset, at) if catches_up else offset)
    steps = pieces(found, ranges)
    if partition.gone is not None:
        return _come_to(partition.gone, steps)
    return steps if partition.share or len(steps) > 1 else []


def of_all_keys(partition: Partition) -> int:
    """The group's progress in all keys of a partition, as far as it is known."""
    known = lowest(partition.committed_by_key or NOWHERE, (SPACE,))
    return max(known, partition.told or 0)
