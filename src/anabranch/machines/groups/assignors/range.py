"""The `range` assignor: each topic's partitions in consecutive ranges, in the order of the members.

The rule it keeps: topics with as many partitions and the same subscribers are split alike, so that a member owns the
same partition indexes of each (co-partitioning). The first subscribers get one more when it does not come out even, and
those beyond the number of partitions get none. Live and retiring partitions are two lists, each with its own ranges.
Who owned what so far does not matter.
"""

from __future__ import annotations

import numpy as np

from anabranch.machines.groups.assignors.spec import LIVE, NOBODY, RETIRING, Ints, Spec, ordered, places


def assign(spec: Spec) -> Ints:
    """Give each subscriber of a topic its range of the topic's live and of its retiring partitions."""
    owner = np.full(len(spec.owner), NOBODY, np.int32)
    subscribers, first, count = _subscribers(spec)
    for kind in (LIVE, RETIRING):
        numbers = spec.numbers(kind)
        if not len(numbers):
            continue
        topic = spec.partitions.topic_of[numbers]
        bundle = spec.subscriptions.bundle_of[topic]
        least, more = np.divmod(np.bincount(topic, minlength=len(spec.partitions.topics))[topic], count[bundle])
        place = places(topic)
        longer = more * (least + 1)
        rank = np.where(place < longer, place // (least + 1), more + (place - longer) // np.maximum(least, 1))
        owner[numbers] = subscribers[first[bundle] + rank]
    return owner


def _subscribers(spec: Spec) -> tuple[Ints, Ints, Ints]:
    """Per bundle its subscribing members in order, all bundles one after the other: members, first, count."""
    subscriptions = spec.subscriptions
    if subscriptions.classes == 1:
        members = np.arange(spec.members, dtype=np.int32)
        return members, np.zeros(1, np.int32), np.array([spec.members], np.int32)
    by_class = ordered(spec.class_of).astype(np.int32)
    begins = np.concatenate([[0], np.cumsum(spec.class_size)])
    size = spec.class_size[subscriptions.class_of]
    bundle = np.repeat(subscriptions.bundle, size)
    at = np.repeat(begins[subscriptions.class_of], size) + places(np.repeat(np.arange(len(size), dtype=np.int32), size))
    members = by_class[at]
    count = np.bincount(bundle, minlength=len(subscriptions.start) - 1).astype(np.int32)
    first = np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int32)
    return members[ordered(bundle, members)], first, count
