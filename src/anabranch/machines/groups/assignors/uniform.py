"""The `uniform` assignor: even to within one partition, and of the present owners as many as that allows.

Live and retiring partitions are two lists, balanced one after the other. For each list:
1. Free partitions go to the classes whose members have least, then, while some bundle of topics has an owner with
   two more than another subscriber, that bundle is levelled between its classes, moving as little as that takes.
2. A class that must give partitions of a bundle takes them from its fullest members.
3. Within a class all members may own the same, so it is made exactly even: members above their share give
   the excess, and free partitions are dealt round the members below it, which spreads topics over members.
Each step is a whole array at a time. With equal subscriptions there is one class, and only step 3. Only moves that by
themselves even two members out are made, not chains of them. Racks are ignored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.machines.groups.assignors.spec import (
    LIVE,
    NOBODY,
    RETIRING,
    Ints,
    Longs,
    Spec,
    ordered,
    places,
)

SCATTER = np.uint32(2_654_435_761)
"""Odd: multiplied by it, neighbouring topics sort far apart."""
RUNS_MAX = 20_000
"""Free partitions are dealt one at a time, several when there are so many members that this many deals are exceeded:
the more topics a member has, the larger is its record."""


def assign(spec: Spec) -> Ints:
    """Balance both lists; where members tie for one more retiring partition, those with fewer live ones get it."""
    owner = spec.owner.copy()
    others = np.zeros(spec.members, np.int64)
    for kind in (LIVE, RETIRING):
        numbers = spec.numbers(kind)
        if not len(numbers):
            continue
        owners = owner[numbers]
        if spec.subscriptions.classes == 1:
            of_class = np.zeros(len(numbers), np.int32)
        else:
            of_class = _between_classes(spec, numbers, owners)
        _within_classes(spec, numbers, owners, of_class, others)
        owner[numbers] = owners
        others += np.bincount(owners, minlength=spec.members)
    return owner


def _within_classes(spec: Spec, numbers: Ints, owners: Ints, of_class: Ints, others: Longs) -> None:
    """Make each class even: change `owners` of the partitions `numbers`, which belong to the classes `of_class`."""
    size = spec.class_size
    least, more = np.divmod(np.bincount(of_class, minlength=len(size)), size)
    held = np.bincount(owners[owners != NOBODY], minlength=spec.members)
    share = least[spec.class_of]
    keeps_most = ordered(
        spec.class_of, (share + 1 - np.minimum(held, share + 1)).astype(np.int32), others.astype(np.int32)
    )
    place = places(spec.class_of[keeps_most])
    share[keeps_most[place < more[spec.class_of[keeps_most]]]] += 1

    over = held > share
    if over.any():
        at = np.flatnonzero(over[owners] & (owners != NOBODY))
        at = at[np.lexsort((*_kept_first(spec, numbers[at]), owners[at]))]
        owners[at[places(owners[at]) >= share[owners[at]]]] = NOBODY

    free = np.flatnonzero(owners == NOBODY)
    if not len(free):
        return
    lacking = share - np.minimum(held, share)
    takers = np.repeat(np.arange(spec.members, dtype=np.int32), lacking)
    at_once = -(-int(lacking.max()) // max(1, RUNS_MAX // int(np.count_nonzero(lacking))))
    rounds = (np.arange(len(takers)) - np.repeat(np.cumsum(lacking) - lacking, lacking)) // at_once
    if len(size) == 1:
        owners[free] = takers[ordered(rounds)]
    else:
        owners[free[ordered(of_class[free])]] = takers[ordered(spec.class_of[takers], rounds)]


def _kept_first(spec: Spec, numbers: Ints) -> tuple[NDArray[np.uint32], Ints]:
    """Sort keys, the last one first, of the partitions a member keeps longest: the first ones of each of its topics.

    So partitions taken away are of many topics, and the last of each, as in the proposal's examples.
    """
    return numbers.astype(np.uint32) * SCATTER, spec.partitions.index[numbers]


def _between_classes(spec: Spec, numbers: Ints, owners: Ints) -> Ints:
    """Share each bundle's partitions between its classes: set the `owners` that give to NOBODY, return classes."""
    subscriptions = spec.subscriptions
    pairs = len(subscriptions.key)
    bundle = spec.bundle_of(numbers)
    held = np.flatnonzero(owners != NOBODY)
    pair = np.full(len(numbers), -1, np.int32)
    pair[held] = subscriptions.pair(bundle[held], spec.class_of[owners[held]])
    before = np.bincount(pair[held], minlength=pairs)
    after = _levelled(spec, before, np.bincount(bundle, minlength=len(subscriptions.start) - 1))

    giving = held[(before > after)[pair[held]]]
    if len(giving):
        # A member's partitions of pairs that give come last, so that the fullest members' rank highest.
        gives = np.zeros(spec.members, np.bool_)
        gives[owners[giving]] = True
        theirs = held[gives[owners[held]]]
        last = (before > after)[pair[theirs]]
        theirs = theirs[np.lexsort((*_kept_first(spec, numbers[theirs]), last, owners[theirs]))]
        height = np.empty(len(numbers), np.int32)
        height[theirs] = places(owners[theirs])
        giving = giving[np.lexsort((height[giving], pair[giving]))]
        gone = giving[places(pair[giving]) >= after[pair[giving]]]
        owners[gone] = NOBODY
        pair[gone] = -1

    free = np.flatnonzero(owners == NOBODY)
    wanted = after - np.minimum(before, after)
    takers = np.repeat(np.arange(pairs, dtype=np.int32), wanted)
    # Each of a bundle's classes takes at even distances, in 1/65,536 of the bundle.
    place = np.arange(len(takers)) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    takers = takers[ordered(subscriptions.bundle[takers], ((2 * place + 1) << 15) // wanted[takers])]
    pair[free[ordered(bundle[free])]] = takers
    return subscriptions.class_of[pair]


def _levelled(spec: Spec, held: Longs, partitions: Longs) -> Longs:
    """Return the share of each pair, given the partitions that it has and the partitions of each bundle."""
    subscriptions = spec.subscriptions
    start, of_class = subscriptions.start, subscriptions.class_of
    size = spec.class_size[of_class]
    mine = held.copy()
    load = np.bincount(of_class, weights=mine, minlength=subscriptions.classes).astype(np.int64)

    free = partitions - np.add.reduceat(mine, start[:-1])
    choice = np.add.reduceat(size, start[:-1])
    for number in np.lexsort((-partitions, choice)).tolist():
        if free[number]:
            here = slice(start[number], start[number + 1])
            added = _filled(load[of_class[here]], size[here], int(free[number]), None)
            mine[here] += added
            load[of_class[here]] += added

    while True:
        each = load[of_class]
        highest = np.maximum.reduceat(np.where(mine > 0, -(-each // size), 0), start[:-1])
        lowest = np.minimum.reduceat(each // size, start[:-1])
        uneven = np.flatnonzero(highest - lowest > 1)
        if not len(uneven):
            return mine
        for number in uneven.tolist():
            here = slice(start[number], start[number + 1])
            now = mine[here]
            wanted = _filled(load[of_class[here]] - now, size[here], int(partitions[number]), now)
            load[of_class[here]] += wanted - now
            mine[here] = wanted


def _filled(load: Longs, size: Longs, count: int, now: Longs | None) -> Longs:
    """Pour `count` partitions over classes with `load` so that their members' levels are as even as can be.

    The least level that is reached is the minimum, over the classes taken lowest first, of what these could reach
    alone. One more partition per member is left to choose; there the classes keep their partitions of `now`.
    """
    lowest_first = np.argsort(load / size, kind="stable")
    level = int(((count + np.cumsum(load[lowest_first])) // np.cumsum(size[lowest_first])).min())
    least = np.maximum(size * level - load, 0)
    most = np.maximum(size * (level + 1) - load, 0)
    given = least.copy() if now is None else np.minimum(np.maximum(now, least), most)
    short = count - int(given.sum())
    room = most - given if short >= 0 else given - least
    step: Longs = np.minimum(np.maximum(abs(short) - (np.cumsum(room) - room), 0), room)
    filled: Longs = given + step if short >= 0 else given - step
    return filled
