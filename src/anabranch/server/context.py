"""The two contexts of a handler: its broker's parts, and the request's origin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from anabranch.runtime.metrics import Metrics
from anabranch.server.cluster.commands import Commands
from anabranch.server.cluster.view import ClusterView
from anabranch.server.coordinators.groups import Groups
from anabranch.server.coordinators.markers import Markers
from anabranch.server.coordinators.producer_ids import ProducerIds
from anabranch.server.coordinators.progress import Memberships
from anabranch.server.coordinators.shard_set import ShardSet
from anabranch.server.coordinators.transactions import Transactions
from anabranch.server.partitions.checks import BatchChecks
from anabranch.server.partitions.fetching import Fetches
from anabranch.server.partitions.load import LoadSampling
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.slices import SliceBooks
from anabranch.server.settings import Address, Settings

Response = TypeVar("Response")


@dataclass(slots=True)
class BrokerContext:
    """The parts of a running broker that its handlers use."""

    settings: Settings
    cluster_id: str
    address: Address
    """Where clients find this broker."""
    clock: Clock
    chance: Chance
    metrics: Metrics
    replicas: Replicas
    checks: BatchChecks
    view: ClusterView
    commands: Commands
    fetches: Fetches
    loads: LoadSampling
    slices: SliceBooks
    memberships: Memberships
    producer_ids: ProducerIds
    transactions: Transactions
    markers: Markers
    groups: Groups
    coordinators: Mapping[int, ShardSet[Any, Any]]
    """By the `key_type` of FindCoordinator."""

    def stop_waiting(self) -> None:
        """Unload the coordinators; answer every waiting fetch, and later ones, with the records that are found."""
        for coordinators in self.coordinators.values():
            coordinators.unload()
        self.fetches.stop()


ANONYMOUS = "User:ANONYMOUS"
"""The principal of a connection that is not authenticated."""


class CloseConnectionError(Exception):
    """The connection must be closed: the request wants no answer and failed, or a fail-over made it obsolete."""


class Apart(NamedTuple):
    """A handler's answer to a request that cannot be handled in the event loop at once.

    The connection calls `handle` with a copy of the request, whose bytes stay, and begins no further request until the
    awaitable is complete: so the order of requests holds. Its result is an answer as any handler gives it.
    """

    handle: Callable[[Any], Awaitable[Any]]


PARTITIONS_AT_A_TIME = 200
"""Partitions that a handler looks at before other work has its turn, and of which an answer is encoded on the loop."""


class Large(NamedTuple):
    """A handler's answer of which there is much: it is made and encoded in a thread, from values that do not change."""

    make: Callable[[], Any]


def large_or_not(make: Callable[[], Response], count: int) -> Response | Large:
    """Make an answer of `count` things: at once, or in a thread where that takes long."""
    return make() if count < PARTITIONS_AT_A_TIME else Large(make)


def keep_message() -> None:
    """Do nothing: there is little of a message that was decoded on the loop."""


NOTHING_TWICE: Set[Hashable] = frozenset()


class RequestContext(NamedTuple):
    """The context of one request: everything except its message."""

    principal: str
    """As Kafka writes it, `type:name`."""
    client_id: str | None
    peer: str
    """The client's address, `host:port`."""
    connection: int
    """The number of its connection: larger than that of every connection accepted before."""
    api_version: int
    release: Callable[[], None] = keep_message
    """Free the request's message, of which nothing may be read from then on, and its part of the memory for decoded
    requests: to be called, once, by a handler that is going to wait."""
    twice: Set[Hashable] = NOTHING_TWICE
    """What the whole request names more than once, of which a handler that is given a part of it refuses all."""
