"""Names for the things that are counted and addressed, as the field names them."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

NO_TOPIC_ID = UUID(int=0)
NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1
NO_SEQUENCE = -1
NO_LEADER_EPOCH = -1
OFFSET_NOT_SAID = -1
"""Of a range of keys in a commit: nothing is said of them, the commit has metadata only."""
COUNT_NOT_SAID = -1
"""`undeleted_partition_count` of a client that does not speak of it: every stock Kafka client."""
INDIVIDUAL_COMMITS_TOPIC = "__individual_commit_offsets"
"""The ranges of offsets that groups have processed above their committed offsets. It may be deleted, if it is damaged:
what lies above committed offsets is then delivered again."""
BEGUN_HERE = "anabranch: begun here"
"""The metadata of an offset at which a reset, or a seek, made a group begin, behind a gate that is closed: nothing
before was read. Otherwise the next owner would take the gate of a segment with a committed offset for one that was
open. Our coordinators keep that with the position (`Position.passed`), and others the metadata."""
INTERNAL_TOPICS = frozenset({"__consumer_offsets", INDIVIDUAL_COMMITS_TOPIC, "__transaction_state"})
"""The logs of the coordinators."""


def is_whole(text: str) -> bool:
    """Whether a text is a whole number without a sign, in the digits that `int` reads: others are digits, too."""
    return text.isascii() and text.isdigit()


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @classmethod
    def named(cls, text: str) -> TopicPartition | None:
        """The partition of which this is the text; None for other text, as the names of files may be."""
        topic, _, number = text.rpartition("-")
        if not topic or not is_whole(number) or str(int(number)) != number:
            return None
        return cls(topic, int(number))
