"""What the handlers of one broker work with, and what they are told about a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from anabranch.server.controller import Controller
from anabranch.server.fetch_sessions import FetchSessions
from anabranch.server.metrics import Metrics
from anabranch.server.producer_ids import ProducerIds
from anabranch.server.replicas import Replicas
from anabranch.server.settings import Address, Settings


@dataclass(slots=True)
class Node:
    """The parts of a running broker."""

    settings: Settings
    cluster_id: str
    broker_settings: Mapping[str, str]
    """The settings that differ from their defaults."""
    address: Address
    """Where clients find this broker."""
    clock: Clock
    chance: Chance
    metrics: Metrics
    replicas: Replicas
    controller: Controller
    fetch_sessions: FetchSessions
    producer_ids: ProducerIds
    caches: dict[str, tuple[int, object]] = field(default_factory=dict)
    """Answers that only change when metadata is published, with the version of the metadata they were made of."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: everything about it that its message does not say."""

    api_version: int
    client_id: str | None
    peer: str
    connection_id: int
