"""Steps and events of a group member's machine, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.machines.clients.key_ranges import WHOLE, KeyRanges
from anabranch.machines.clients.membership.assignors import MemberAssignment

UNRELATED_TO_MEMBER = frozenset(
    {
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    }
)
"""Errors unrelated to the member: the same request may succeed later, perhaps at another broker."""


class Owned(NamedTuple):
    """One partition of one topic, or ranges of its keys, by name and by id; the classic protocol has no ids."""

    topic: str
    partition: int
    topic_id: UUID = NO_TOPIC_ID
    keys: KeyRanges = WHOLE

    @property
    def name(self) -> TopicPartition:
        """The partition by name."""
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class Subscription:
    """A member's subscription: topics by name, or all topics that an RE2 pattern matches in full."""

    topics: frozenset[str] = frozenset()
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send `request` to the group's coordinator; report the response, or its absence, with the ticket."""

    ticket: int
    request: Any
    timeout_ms: int | None = None
    """For requests that wait at the coordinator; None for the client's usual timeout."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Run `work`, which may take long, off the event loop; report its result or exception with the ticket."""

    ticket: int
    work: Any


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Wait until `at_ms`, or, with None, until the next report."""

    at_ms: int | None


@dataclass(frozen=True, slots=True)
class Revoke:
    """Finish work on these partitions, or on these ranges of their keys, commit, and release them."""

    partitions: frozenset[Owned]


@dataclass(frozen=True, slots=True)
class Assign:
    """Start to read these partitions, or these further ranges of their keys."""

    partitions: frozenset[Owned]


@dataclass(frozen=True, slots=True)
class Lost:
    """Drop these partitions without a commit: other members may own them already.

    A member that has slices drops them, too, and is told so where no partition is assigned to it.
    """

    partitions: frozenset[Owned]


@dataclass(frozen=True, slots=True)
class Explain:
    """Report this member's assignment in a new epoch to the local assignors."""

    error: int
    assignment: MemberAssignment
    member_epoch: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The member has left its group after a fatal error, and does not rejoin by itself."""

    error: ApiError


Step = Send | Compute | WaitUntil
Event = Revoke | Assign | Lost | Explain | Failed


class TopicFacts(NamedTuple):
    """The metadata of a topic, as needed by the machines."""

    name: str
    topic_id: UUID
    partition_count: int
    retiring_count: int = 0
    """How many of the partitions, the highest ones, are retiring."""


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """The settings of a member, by Kafka's names."""

    group_id: str
    group_instance_id: str | None = None
    client_rack: str | None = None
    max_poll_interval_ms: int = 300_000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
    allow_key_share: bool = False
    share: str = "none"
    """`any`: the member has slices, whatever is assigned to it, and loses them with its membership."""


class Member(Protocol):
    """The interface of both machines to their drivers."""

    def subscribe(self, subscription: Subscription) -> None: ...
    def leave(self, *, stay: bool | None = None) -> None: ...
    def next(self, now_ms: int) -> Step: ...
    def event(self) -> Event | None: ...
    def take(self) -> Event | None: ...
    def done(self, event: Event, now_ms: int) -> None: ...
    def on_response(self, ticket: int, response: Any, now_ms: int) -> None: ...
    def on_error(self, ticket: int, error: Exception, now_ms: int) -> None: ...
    def on_topics(self, topics: Iterable[TopicFacts]) -> None: ...
    def commit_refused(self, code: ErrorCode, epoch: int, now_ms: int) -> None: ...
    def heartbeat_now(self) -> None: ...
    def layout_changed(self) -> None: ...
    def poll_began(self, now_ms: int) -> bool: ...
    def poll_ended(self, now_ms: int) -> int: ...

    @property
    def owned(self) -> frozenset[Owned]: ...
    @property
    def member_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_member(self) -> bool: ...
    @property
    def has_left(self) -> bool: ...
    @property
    def wanted_ids(self) -> frozenset[UUID]: ...
    @property
    def wanted_topics(self) -> frozenset[str]: ...


def backoff_ms(settings: MemberSettings, failures: int) -> int:
    """Return the delay in ms after a number of failures in a row."""
    return min(settings.retry_backoff_ms << min(max(failures - 1, 0), 16), settings.retry_backoff_max_ms)


def by_topic(partitions: Iterable[Owned]) -> Mapping[tuple[str, UUID], list[int]]:
    """Group partitions by topic, numbers in order."""
    found: dict[tuple[str, UUID], list[int]] = {}
    for owned in sorted(partitions):
        found.setdefault((owned.topic, owned.topic_id), []).append(owned.partition)
    return found
