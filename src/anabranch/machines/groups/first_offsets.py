"""The position that the coordinator writes when it hands out a partition of which a group has no committed offset.

the partition appeared after the group began             ->  the log start
it existed, and did not wait at a gate                   ->  none: the client begins as its reset says
it waited, and the group is known to read from the end   ->  the log end when the group began, or the gate
it waited, and nothing was written meanwhile             ->  none: the client's reset loses nothing either way
it waited, and what its reset says is not known          ->  the log start, which loses nothing
it waited, and its group is a classic one now            ->  the same, when it becomes one, or subscribes to the topic

That a partition waited is written down with the group's start, as another coordinator may hand it out. A group that
began before its topic was first resized has no log end noted: then the gate is, from which on its records wait. The
log end at which a coordinator finds out that they do would be behind those that were written since the resize.
"""

from __future__ import annotations

from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.target import subscriptions
from anabranch.machines.groups.gates import segment_start
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.groups.starts import NOT_NOTED, Starts


class FirstOffsets:
    """The first positions of a shard's groups."""

    def __init__(self, offsets: Offsets, starts: Starts, regexes: Regexes) -> None:
        self._offsets = offsets
        self._starts = starts
        self._regexes = regexes

    def of(
        self, group: ConsumerGroup, topic: TopicImage, number: int, waited: int | None, *, stands_late: bool
    ) -> int | None:
        """The position to write for a partition; None leaves it to the client.

        `waited`: the gate at which it waits under this coordinator, None if it does not. `stands_late`: an owner
        without a commit was found behind a log start of the topic.
        """
        log_start = topic.log_start(number)
        if not topic.was_resized:
            return None
        begins = self._begins(group, topic)
        if not (begins or self._starts.existed(group.group_id, topic, number)):
            return log_start
        if waited is None and not self._starts.waited(group.group_id, topic, number):
            return None
        noted = self._starts.noted_end(group.group_id, topic, number)
        if noted == NOT_NOTED:
            noted = topic.log_end(number) if begins else _gate(topic, number, waited)
        reads_from_end = self.reads_from_end(group.group_id, topic, stands_late=stands_late)
        return _of_waited(topic, number, noted, reads_from_end=reads_from_end)

    def of_classic(self, group_id: str, topic: TopicImage, number: int, *, reads_from_end: bool) -> int | None:
        """The position to write for a partition that waited before its group was a classic one; None as for `of`.

        At the gate at the most: it may be closed still, and the leader of the group hands the partition out.
        """
        gate, noted = _gate(topic, number, None), self._starts.noted_end(group_id, topic, number)
        noted = gate if noted == NOT_NOTED else noted
        offset = _of_waited(topic, number, noted, reads_from_end=reads_from_end)
        return None if offset is None else max(min(offset, gate), topic.log_start(number))

    def reads_from_end(self, group_id: str, topic: TopicImage, *, stands_late: bool) -> bool:
        """Whether a group is known to read a topic from its end."""
        return self._starts.reads_from_end(
            group_id,
            topic.topic_id,
            lambda number: self._offsets.current(group_id, topic.name, number) is not None,
            stands_late=stands_late,
        )

    def _begins(self, group: ConsumerGroup, topic: TopicImage) -> bool:
        """Whether the group begins in the topic with this decision."""
        return self._starts.get(group.group_id, topic.topic_id) is None and not (
            (group.members and topic.name in subscriptions(group, self._offsets.image, self._regexes))
            or self._offsets.has_begun(group.group_id, topic)
        )


def _of_waited(topic: TopicImage, number: int, noted: int, *, reads_from_end: bool) -> int | None:
    log_start = topic.log_start(number)
    if reads_from_end:
        return max(log_start, noted)
    # Of an empty partition the log start is both ends.
    return None if log_start < topic.log_end(number) <= noted else log_start


def _gate(topic: TopicImage, number: int, waited: int | None) -> int:
    """The gate at which a partition waits; where that is not known the first that it may have waited at."""
    if waited is not None:
        return waited
    return topic.log_start(number) if topic.lineage is None else segment_start(topic, number, 1)
