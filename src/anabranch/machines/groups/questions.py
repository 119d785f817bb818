"""ConsumerGroupPosition (API 10001): the parked questions of a group's members.

A member has at most one: a later question ends the earlier one. A question is over when the coordinator knows something
else than the member does (`Question.known`), when the member is to report one of its partitions, when the member has
something to reconcile, and when its time is up. Nothing here is stored: after a fail-over members ask and report again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.base.limits import POSITION_WAIT_MAX_MS
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.standing import At
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionRequestTopic,
    ConsumerGroupPositionResponse,
    ConsumerGroupPositionResponsePartition,
    ConsumerGroupPositionResponseTopic,
)


class Told(NamedTuple):
    """What a member is told of a partition."""

    position: int = -1
    """The group's progress; -1 if it is unknown."""
    by_time: int = -1
    """The offset up to which the partition counts as read because gates open by time: -1 where they do not."""


@dataclass(slots=True)
class Question:
    """The question of one member."""

    member_id: str
    ticket: Hashable
    topics: tuple[tuple[str, TopicImage | None, tuple[int, ...]], ...]
    """As asked: the topic's name, the topic where it is known, and the partitions that the member needs."""
    known: dict[At, Told]
    """What the member knows of the partitions that it needs."""
    listed: frozenset[At]
    """The partitions that the member has reported, or would."""

    deadline_ms: int = 0

    def reply(self, positions: Mapping[At, Told], wanted: Iterable[At], image: Image) -> ConsumerGroupPositionResponse:
        """Give the positions of all needed partitions, and name those in `wanted`, which the member is to report."""
        answers: list[ConsumerGroupPositionResponseTopic] = []
        more: dict[UUID, list[int]] = {}
        for topic_id, number in wanted:
            more.setdefault(topic_id, []).append(number)
        for name, topic, numbers in self.topics:
            parts = []
            for number in numbers:
                told = None if topic is None else positions.get((topic.topic_id, number))
                parts.append(_part(number, told or Told()))
            if topic is not None:
                parts += map(_wish, sorted(more.pop(topic.topic_id, ())))
            answers.append(ConsumerGroupPositionResponseTopic(topic=name, partitions=parts))
        for topic_id, left in more.items():
            parts = [_wish(number) for number in sorted(left)]
            answers.append(ConsumerGroupPositionResponseTopic(topic=image.name_of(topic_id), partitions=parts))
        return ConsumerGroupPositionResponse(topics=answers)


def _part(number: int, told: Told) -> ConsumerGroupPositionResponsePartition:
    part = ConsumerGroupPositionResponsePartition(partition=number, position=told.position)
    part.overdue = told.by_time >= 0
    part.overdue_to = told.by_time
    return part


def _wish(number: int) -> ConsumerGroupPositionResponsePartition:
    return ConsumerGroupPositionResponsePartition(partition=number, need_position=True)


@dataclass(slots=True)
class Questions:
    """The parked questions of one group, by member."""

    parked: dict[str, Question] = field(default_factory=dict)
    askers: dict[At, set[str]] = field(default_factory=dict)
    """The members that need a partition's position."""
    replied: dict[str, dict[At, Told]] = field(default_factory=dict)
    """By member, the positions of the last reply."""
    known: int = 0
    """The partitions that all parked questions name, each as often as it is named."""
    changes: int = 0
    """Counts questions that were parked or ended."""

    def park(self, question: Question) -> None:
        """Keep a member's question; the one before it must have been ended."""
        assert question.member_id not in self.parked
        self.parked[question.member_id] = question
        self.changes += 1
        self.known += len(question.known)
        for at in question.known:
            self.askers.setdefault(at, set()).add(question.member_id)

    def has_asked(self, member_id: str) -> bool:
        """Whether a member has asked, as no stock consumer does."""
        return member_id in self.parked or member_id in self.replied

    def end(self, member_id: str) -> Question | None:
        """Take a member's question out."""
        question = self.parked.pop(member_id, None)
        self.changes += question is not None
        self.known -= 0 if question is None else len(question.known)
        for at in () if question is None else question.known:
            members = self.askers[at]
            members.discard(member_id)
            if not members:
                del self.askers[at]
        return question


def refused(error: ErrorCode) -> ConsumerGroupPositionResponse:
    """The answer to a question that is not taken, or not answered."""
    return ConsumerGroupPositionResponse(error_code=error)


def wait_ms(request: ConsumerGroupPositionRequest, session_timeout_ms: int) -> int:
    """For how long to park a question."""
    return max(0, min(request.max_wait_ms, session_timeout_ms // 2, POSITION_WAIT_MAX_MS))


def named(
    request: ConsumerGroupPositionRequest, image: Image
) -> Iterator[tuple[ConsumerGroupPositionRequestTopic, TopicImage | None]]:
    """The topics of a request, by id where it says one, and otherwise by name."""
    for asked in request.topics:
        if asked.topic_id != NO_TOPIC_ID:
            yield asked, image.by_id.get(asked.topic_id)
        else:
            yield asked, image.by_name.get(asked.topic)
