"""The consumer protocol inside JoinGroup and SyncGroup: subscriptions and assignments behind a version of their own.

A version newer than ours is read as our newest, as all Kafka clients do. Coordinators pass on whatever they are given;
they read what is small enough for a step of the loop (`READ_SIZE_MAX`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.base.errors import DecodeError
from anabranch.codec import Blob, decode_prefix, encode
from anabranch.machines.groups.consumer.group import Assignment, assignment_of
from anabranch.machines.groups.image import Image
from anabranch.protocol.messages import consumer_protocol_assignment
from anabranch.protocol.messages.consumer_protocol_assignment import ConsumerProtocolAssignment
from anabranch.protocol.messages.consumer_protocol_subscription import ConsumerProtocolSubscription, TopicPartition

CONSUMER_PROTOCOL = "consumer"
VERSION_MAX = 3
OWNED_SINCE = 1
READ_SIZE_MAX = 128 * 1024
"""Bytes that are read of one member, and of all assignments of a group: 30,000 partitions, or 10,000 names; 5 ms."""


def subscription(data: Blob) -> tuple[int, ConsumerProtocolSubscription]:
    """Read a version and subscription. DecodeError for malformed bytes."""
    version = _version(data)
    return version, decode_prefix(ConsumerProtocolSubscription, data, version, 2)[0]


def topics(data: Blob) -> Sequence[str]:
    """Read the topics of a subscription. DecodeError for malformed bytes."""
    _version(data)
    return decode_prefix(ConsumerProtocolSubscription, data, 0, 2)[0].topics


def assigned(data: Blob, image: Image) -> Assignment:
    """Read the partitions of an assignment, of existing topics. DecodeError for malformed bytes."""
    return by_id(_assigned(data), image)


def assigned_by_name(data: Blob) -> dict[str, set[int]]:
    """Read the partitions of an assignment by name, of any topic. DecodeError for malformed bytes."""
    found: dict[str, set[int]] = {}
    for topic in _assigned(data):
        found.setdefault(topic.topic, set()).update(topic.partitions)
    return found


def by_id(topics: Iterable[TopicPartition | consumer_protocol_assignment.TopicPartition], image: Image) -> Assignment:
    """Partitions by topic id, of existing topics."""
    return assignment_of(
        {known.topic_id: topic.partitions for topic in topics if (known := image.by_name.get(topic.topic)) is not None}
    )


def assignment_data(assignment: Assignment, image: Image, version: int) -> bytes:
    """An assignment as a classic consumer reads it."""
    topics = [
        consumer_protocol_assignment.TopicPartition(topic=name, partitions=list(partitions))
        for topic_id, partitions in assignment
        if (name := image.name_of(topic_id))
    ]
    made = ConsumerProtocolAssignment(assigned_partitions=topics)
    return version.to_bytes(2) + b"".join(encode(made, version))


def _assigned(data: Blob) -> Sequence[consumer_protocol_assignment.TopicPartition]:
    if not len(data):
        return ()
    return decode_prefix(ConsumerProtocolAssignment, data, _version(data), 2)[0].assigned_partitions


def _version(data: Blob) -> int:
    if len(data) < 2:
        raise DecodeError("an embedded consumer protocol begins with its version")
    version = int.from_bytes(data[:2], signed=True)
    if version < 0:
        raise DecodeError(f"there is no version {version} of the embedded consumer protocol")
    if len(data) > READ_SIZE_MAX:
        raise DecodeError(f"{len(data)} bytes are more than is looked into")
    return min(version, VERSION_MAX)
