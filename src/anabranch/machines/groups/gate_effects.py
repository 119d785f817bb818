"""What the gates of a group have their coordinator do beside answering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID


class AskNextRecords(NamedTuple):
    """Effect: ask the leaders for next records of one topic; `Coordinator.next_records` takes the answer."""

    group_id: str
    topic_id: UUID
    topic: str
    offsets: Mapping[int, int]
    """By partition."""


class GateOpenedByTime(NamedTuple):
    """Effect: log and count a gate that has opened although a position it waited on has records left."""

    group_id: str
    topic: str
    partition: int
    waited_on: int
    records_left: int
