"""The `range` assignor: each topic's partitions in consecutive ranges, in the order of the members.

The rule it keeps: topics with as many partitions and the same subscribers are split alike, so that a member owns the
same partition indexes of each (co-partitioning). The first subscribers get one more when it does not come out even, and
those beyond the number of partitions get none. Live and retiring partitions are two lists, each with its own ranges.
Present owners do not matter.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from anabranch.machines.groups.assignors.spec import LIVE, NOBODY, RETIRING, Ints, Longs, Spec, ordered, places

DENSE = 10
"""How many members can be looked at in the time that one takes to be sorted."""


def assign(spec: Spec) -> Ints:
    """Give each subscriber of a topic its range of the topic's live and of its retiring partitions."""
    owner = np.full(len(spec.owner), NOBODY, np.int32)
    subscribers, first, count = _subscribers(spec)
    for kind in (LIVE, RETIRING):
        numbers = spec.numbers(kind)
        if not len(numbers):
            continue
        topic = spec.partitions.topic_of[numbers]
        partitions = np.bincount(topic, minlength=len(spec.partitions.topics)).astype(np.int32)
        bundle = spec.subscriptions.bundle_of
        least, more = np.divmod(partitions, count[bundle].astype(np.int32))
        place = np.arange(len(numbers), dtype=np.int32) - (np.cumsum(partitions, dtype=np.int32) - partitions)[topic]
        # The first `more` subscribers have one more, so up to there counting is in ranges of that length.
        beyond = place - (more * (least + 1))[topic]
        rank = np.where(beyond < 0, place // (least + 1)[topic], more[topic] + beyond // np.maximum(least, 1)[topic])
        owner[numbers] = subscribers[first[bundle].astype(np.int32)[topic] + rank]
    return owner


def _subscribers(spec: Spec) -> tuple[Ints, Longs, Longs]:
    """Per bundle its subscribing members in order, all bundles one after the other: members, first, count."""
    subscriptions = spec.subscriptions
    start, size = subscriptions.start, spec.class_size[subscriptions.class_of]
    count: Longs = np.add.reduceat(size, start[:-1])
    first = np.cumsum(count) - count
    if len(count) * spec.members < DENSE * int(count.sum()):
        # Look at all members for each bundle.
        members = np.empty(int(count.sum()), np.int32)
        for bundle, (begin, end) in enumerate(pairwise(start.tolist())):
            classes = np.zeros(subscriptions.classes, np.bool_)
            classes[subscriptions.class_of[begin:end]] = True
            members[first[bundle] : first[bundle] + count[bundle]] = np.flatnonzero(classes[spec.class_of])
        return members, first, count
    by_class = ordered(spec.class_of).astype(np.int32)
    begins = np.cumsum(spec.class_size) - spec.class_size
    pair = np.repeat(np.arange(len(size), dtype=np.int32), size)
    members = by_class[begins[subscriptions.class_of[pair]] + places(pair)]
    return members[ordered(subscriptions.bundle[pair], members)], first, count
