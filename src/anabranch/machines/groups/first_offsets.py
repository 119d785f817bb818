"""The position that the coordinator writes when it hands out a partition of which a group has no committed offset.

the partition appeared after the group began             ->  the log start
it existed, and did not wait at a gate                   ->  none: the client begins as its reset says
it waited, and the group is known to read from the end   ->  the log end when the group began, or the wait did
it waited, and nothing was written meanwhile             ->  none: the client's reset loses nothing either way
it waited, and what its reset says is not known          ->  the log start, which loses nothing
"""

from __future__ import annotations

from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.target import subscriptions
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.groups.starts import Starts


class FirstOffsets:
    """The first positions of a shard's groups."""

    def __init__(self, offsets: Offsets, starts: Starts, regexes: Regexes) -> None:
        self._offsets = offsets
        self._starts = starts
        self._regexes = regexes

    def of(
        self, group: ConsumerGroup, topic: TopicImage, number: int, waited_from: int | None, *, stands_late: bool
    ) -> int | None:
        """The position to write for a partition; None leaves it to the client.

        `waited_from`: the log end when the partition began to wait, None if it did not. `stands_late`: an owner without
        a commit was found behind a log start of the topic.
        """
        log_start = topic.log_start(number)
        if not topic.was_resized:
            return None
        if not self._existed(group, topic, number):
            return log_start
        if waited_from is None:
            return None
        noted = self._starts.noted_end(group.group_id, topic, number)
        noted = waited_from if noted < 0 else noted
        if self._reads_from_end(group.group_id, topic, stands_late=stands_late):
            return max(log_start, noted)
        # Of an empty partition the log start is both ends.
        return None if log_start < topic.log_end(number) <= noted else log_start

    def _reads_from_end(self, group_id: str, topic: TopicImage, *, stands_late: bool) -> bool:
        return self._starts.reads_from_end(
            group_id,
            topic.topic_id,
            lambda number: self._offsets.current(group_id, topic.name, number) is not None,
            stands_late=stands_late,
        )

    def _existed(self, group: ConsumerGroup, topic: TopicImage, number: int) -> bool:
        """Whether a partition existed when the group began in its topic, which may be with this decision."""
        begins = self._starts.get(group.group_id, topic.topic_id) is None and not (
            (group.members and topic.name in subscriptions(group, self._offsets.image, self._regexes))
            or self._offsets.has_begun(group.group_id, topic)
        )
        return begins or self._starts.existed(group.group_id, topic, number)
