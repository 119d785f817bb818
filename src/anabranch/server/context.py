"""What the handlers of one broker work with, and what they are told about a request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from anabranch.runtime.metrics import Metrics
from anabranch.server.cluster.controller import Controller
from anabranch.server.coordinators.groups import Groups
from anabranch.server.coordinators.producer_ids import ProducerIds
from anabranch.server.coordinators.shard_set import Coordinators
from anabranch.server.coordinators.transactions import Transactions
from anabranch.server.partitions.fetch_sessions import FetchSessions
from anabranch.server.partitions.replicas import Replicas
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
    transactions: Transactions
    groups: Groups
    coordinators: Mapping[int, Coordinators[Any, Any]]
    """By the `key_type` of FindCoordinator."""
    metadata: dict[tuple[str, bool], object] = field(default_factory=dict)
    """What Metadata answers about topics, made of the controller's state at `metadata_version`."""
    metadata_version: int = -1
    parked: set[asyncio.Future[None]] = field(default_factory=set)
    """Fetches that wait for records: a stop ends their waiting."""
    stopping: bool = False

    def stop_waiting(self) -> None:
        """Have every waiting fetch answered with what there is, now and from now on."""
        self.stopping = True
        for coordinators in self.coordinators.values():
            coordinators.unload()
        for waiting in self.parked:
            if not waiting.done():
                waiting.set_result(None)


class CloseConnectionError(Exception):
    """The request can only be answered by hanging up: it asked for no answer, and went wrong."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request: everything about it that its message does not say."""

    api_version: int
    client_id: str | None
    peer: str
    connection_id: int
