"""The effects that a decision asks of the shell, and the replies to a command.

Effects are performed after the outcome's records are durable and applied, in order; those for one broker reach it in
the order they were given. `SendLeaderAndIsr` and `SendStopReplica` are answered with the event of their name, which
carries the effect back; an answer may be late, doubled or missing. Any effect may be repeated: it is a whole target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.nodes import MetadataRecord
from anabranch.machines.outcome import Draft, Outcome


@dataclass(frozen=True, slots=True)
class Role:
    """The target role of one partition's leader: one partition state of a LeaderAndIsr request."""

    partition: int
    leader: int
    leader_epoch: int
    layout: int
    """The number of the layout it serves: `partition_epoch` on the wire, where it grows with every change of role."""
    retiring: bool
    """Closed for appends. It follows from the counts: `partition >= undeleted_partition_count`."""
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    start_offset: int = 0
    """Where the log starts if it must be made."""


@dataclass(frozen=True, slots=True)
class SendLeaderAndIsr:
    """Order a broker to take roles in one topic under one count. Answer: `leader_and_isr_answered`."""

    broker_id: int
    broker_epoch: int
    controller_epoch: int
    topic: str
    topic_id: UUID
    initial_partition_count: int
    undeleted_partition_count: int
    roles: tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class SendStopReplica:
    """Order a broker to delete replicas, (partition, leader epoch) each. Answer: `stop_replica_answered`.

    A replica that is not there counts as deleted. One of a later leader epoch, or of another topic id, stays.
    """

    broker_id: int
    broker_epoch: int
    controller_epoch: int
    topic: str
    topic_id: UUID
    partitions: tuple[tuple[int, int], ...]
    topic_deleted: bool = False
    """Whether the topic is deleted too; otherwise a partition may be created again, and its producer state is kept."""


@dataclass(frozen=True, slots=True)
class PublishMetadata:
    """UpdateMetadata: the `views.topic_view` of these topics changed; a topic without a view is deleted."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApplyConfigs:
    """The configs of a topic changed: its logs go on with `state.configs[topic]`."""

    topic: str


@dataclass(frozen=True, slots=True)
class InspectRetiring:
    """These topics have retiring partitions that may be empty: submit `decide_reap` with their log starts and ends.

    The shell does so besides on its own, periodically and after DeleteRecords and retention.
    """

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InspectLayouts:
    """These topics have had many resizes: submit `decide_fold_layouts` with the layouts that their logs hold.

    The shell does so besides on its own, periodically.
    """

    topics: tuple[str, ...]


Effect = SendLeaderAndIsr | SendStopReplica | PublishMetadata | ApplyConfigs | InspectRetiring | InspectLayouts

Reply = TypeVar("Reply", covariant=True)
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Decision(Outcome[Reply, MetadataRecord]):
    """Persist `records`, apply them, set `timers`, perform `effects` in order, then answer `reply`.

    Records are best persisted together; when they are not, then in order, and any prefix of them may survive.
    `Confirmed` and `Stopped` are applied only.
    """

    effects: tuple[Effect, ...] = ()


def decision(draft: Draft[MetadataRecord], reply: Given) -> Decision[Given]:
    """Give what was gathered, and this reply."""
    return Decision(reply, tuple(draft.records), draft.timers, effects=tuple(draft.effects))


@dataclass(frozen=True, slots=True)
class Accepted:
    """The command is durable and will be carried out, also after a crash. `views.settled` tests for its completion."""

    topic: str
    topic_id: UUID
    layout: int | None = 0
    """The layout that it makes; None for a deletion."""
    count: int | None = None
    """The partition count of that layout, for a resize."""


@dataclass(frozen=True, slots=True)
class Validated:
    """`validate_only`: the command would be accepted."""


@dataclass(frozen=True, slots=True)
class WaitForResize:
    """Another change of the topic is in progress: submit the command again once `views.idle` is true.

    When the request's own deadline comes first, nothing was done: answer `code` and `message`.
    """

    topic: str
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The command is refused; nothing was changed."""

    code: ErrorCode
    message: str


CommandReply = Accepted | Validated | WaitForResize | Refused
