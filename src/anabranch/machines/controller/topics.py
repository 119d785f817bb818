"""Creating and deleting topics.

A topic exists once its node is durable, with its configs before it, so that it never serves with other configs; the
next term writes a missing state node. A deletion is decided once its mark is durable: the topic is
hidden from then on, its replicas are deleted, then its nodes, the mark last. Topic ids are given in and never reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import INDIVIDUAL_COMMITS_TOPIC, INTERNAL_TOPICS
from anabranch.base.limits import PARTITIONS_PER_TOPIC_MAX, TOPIC_NAME_LENGTH_MAX
from anabranch.machines.controller import nodes
from anabranch.machines.controller.configs import NOT_SET, BrokerSettings, overrides_of, refuse_configs
from anabranch.machines.controller.effects import (
    Accepted,
    CommandReply,
    Decision,
    Refused,
    SendStopReplica,
    Validated,
    WaitForResize,
)
from anabranch.machines.controller.layouts import Layout
from anabranch.machines.controller.nodes import DeleteNode, MetadataRecord, Topic
from anabranch.machines.controller.plan import Plan
from anabranch.machines.controller.state import ControllerState

REPLICATION_FACTOR_MAX = 1
LEGAL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


@dataclass(frozen=True, slots=True)
class CreateTopic:
    """One topic of a CreateTopics request."""

    name: str
    topic_id: UUID
    """Made by the shell, never used before."""
    partition_count: int = -1
    """-1: the default."""
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Partition to brokers, when the caller chooses; the two counts are -1 then."""
    configs: Mapping[str, str | None] = field(default_factory=dict)
    validate_only: bool = False


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    """One topic of a DeleteTopics request, by name or by id."""

    name: str | None = None
    topic_id: UUID | None = None


def decide_create_topic(
    state: ControllerState,
    command: CreateTopic,
    default_count: int = 1,
    broker_settings: BrokerSettings = NOT_SET,
    per_broker_max: int | None = None,
) -> Decision[CommandReply]:
    """Make a topic. `default_count` is `num.partitions`, `per_broker_max` is `max.partitions.per.broker`."""
    refusal = refuse_name(state, command.name)
    if refusal is not None:
        return Decision(reply=refusal)
    placed = _place(state, command, default_count)
    if isinstance(placed, Refused):
        return Decision(reply=placed)
    refusal = refuse_more(state, len(placed), per_broker_max)
    if refusal is not None:
        return Decision(reply=refusal)
    overrides = overrides_of(command.configs)
    refusal = refuse_configs(overrides, broker_settings)
    if refusal is not None:
        return Decision(reply=refusal)
    if command.validate_only:
        return Decision(reply=Validated())
    topic = Topic(
        name=command.name,
        topic_id=command.topic_id,
        partitions=dict(enumerate(placed)),
        initial_partition_count=len(placed),
        layouts=(Layout(0, len(placed)),),
    )
    plan = Plan(state, topic)
    plan.draft.write(nodes.put_configs(topic.name, overrides))
    plan.write(topic)
    plan.send_roles(range(len(placed)))
    plan.publish()
    return plan.decision(Accepted(topic.name, topic.topic_id))


def decide_delete_topic(state: ControllerState, command: DeleteTopic) -> Decision[CommandReply]:
    """Delete a topic, whatever else is going on with it, unless the broker keeps it for itself."""
    name = command.name if command.topic_id is None else state.names.get(command.topic_id)
    topic = state.topics.get(name) if name is not None else None
    if topic is None:
        if command.topic_id is not None:
            return Decision(reply=Refused(ErrorCode.UNKNOWN_TOPIC_ID, f"There is no topic with id {command.topic_id}."))
        return Decision(reply=unknown_topic(str(name)))
    if topic.name in INTERNAL_TOPICS - {INDIVIDUAL_COMMITS_TOPIC}:
        text = "The broker keeps its groups and transactions in this topic."
        return Decision(reply=Refused(ErrorCode.INVALID_TOPIC_EXCEPTION, text))
    plan = Plan(state, topic)
    if topic.name not in state.deleting:
        plan.draft.write(nodes.put_deletion(topic))
        plan.publish()
        plan.send_stops(sorted(topic.partitions))
    return plan.decision(Accepted(topic.name, topic.topic_id, layout=None))


def decide_stop_replica_answered(
    state: ControllerState, effect: SendStopReplica, errors: Mapping[int, ErrorCode], now_ms: int
) -> Decision[None]:
    """A broker answered a StopReplica: an error code for each partition; one that is missing was not answered."""
    topic = state.topics.get(effect.topic)
    if topic is None or topic.topic_id != effect.topic_id or effect.controller_epoch != state.controller_epoch:
        return Decision(reply=None)
    plan = Plan(state, topic)
    going = topic.partitions if topic.name in state.deleting else dict.fromkeys(topic.reaping)
    asked = {p for p, epoch in effect.partitions if p in going and epoch >= plan.last_epoch(p)}
    gone = frozenset((p, effect.broker_id) for p in asked if errors.get(p) is ErrorCode.NONE)
    if gone:
        plan.note_stopped(gone)
    if len(gone) < len(asked):
        plan.retry_later(now_ms)
    if gone and all(plan.stopped(p) for p in going):
        if topic.name in state.deleting:
            plan.draft.write(*deleted_nodes(state, topic.name))
        else:
            plan.forget_reaped()
    return plan.decision(None)


def deleted_nodes(state: ControllerState, name: str) -> list[MetadataRecord]:
    """The records that delete every node of a topic without replicas, its deletion mark last."""
    path = nodes.topic_path(name)
    topic = state.topics.get(name)
    partitions = set(state.partitions.get(name, ())) | set(topic.partitions if topic is not None else ())
    records: list[MetadataRecord] = []
    for partition in sorted(partitions):
        state_path = nodes.partition_path(name, partition)
        records += (DeleteNode(state_path), DeleteNode(state_path.removesuffix("/state")))
    records += (DeleteNode(f"{path}/partitions"), DeleteNode(path))
    records += (DeleteNode(nodes.config_path(name)), DeleteNode(nodes.deletion_path(name)))
    return records


def is_topic_name(name: str) -> bool:
    """Whether a topic can have the name."""
    return name not in ("", ".", "..") and len(name) <= TOPIC_NAME_LENGTH_MAX and LEGAL.issuperset(name)


def refuse_name(state: ControllerState, name: str) -> Refused | WaitForResize | None:
    """Return the refusal of a topic name that cannot be created; None for a valid name."""
    if not is_topic_name(name):
        return Refused(
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            f"The topic name {name[: TOPIC_NAME_LENGTH_MAX + 1]!r} is not valid: a name has 1 to "
            f"{TOPIC_NAME_LENGTH_MAX} characters out of letters, digits, '.', '_' and '-', and is not '.' or '..'.",
        )
    if name in state.deleting:
        return WaitForResize(name, ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic {name!r} is still being deleted; try again.")
    if name in state.topics:
        return Refused(ErrorCode.TOPIC_ALREADY_EXISTS, f"Topic {name!r} already exists.")
    other = state.collapsed.get(nodes.collapsed(name))
    if other is not None:
        return Refused(
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            f"The topic name {name!r} collides with the existing topic {other!r}: names that differ in '.' and '_' "
            "alone cannot be told apart in metrics.",
        )
    return None


def refuse_more(state: ControllerState, count: int, per_broker_max: int | None) -> Refused | None:
    """Refuse `count` new partitions above what the live brokers may hold."""
    if per_broker_max is None or state.partition_count + count <= per_broker_max * len(state.brokers):
        return None
    where = "The broker holds" if len(state.brokers) == 1 else f"The {len(state.brokers)} brokers hold"
    return Refused(
        ErrorCode.POLICY_VIOLATION,
        f"{where} {state.partition_count} partitions, and max.partitions.per.broker is {per_broker_max}: {count} more "
        "are refused. Delete topics, or raise the setting.",
    )


def unknown_topic(name: str) -> Refused:
    """The refusal for a topic that is not there."""
    return Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no topic {name!r}.")


def spread(state: ControllerState, count: int) -> list[tuple[int, ...]] | Refused:
    """Choose replicas for `count` new partitions: each time the live broker that leads the fewest."""
    if not state.brokers:
        return Refused(ErrorCode.INVALID_REPLICATION_FACTOR, "No broker is there to hold the partitions.")
    if len(state.brokers) == 1:
        return [tuple(state.brokers)] * count
    leads = dict.fromkeys(state.brokers, 0)
    for siblings in state.partitions.values():
        for node in siblings.values():
            if node.leader in leads:
                leads[node.leader] += 1
    heap = [(led, broker) for broker, led in leads.items()]
    heapify(heap)
    chosen: list[tuple[int, ...]] = []
    for _ in range(count):
        led, broker = heappop(heap)
        chosen.append((broker,))
        heappush(heap, (led + 1, broker))
    return chosen


def refuse_replicas(state: ControllerState, replicas: Sequence[int]) -> Refused | None:
    """Return the refusal of a caller's choice of brokers for one partition; None for a valid choice."""
    if not replicas or len(set(replicas)) != len(replicas):
        return Refused(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"An assignment needs brokers, each once; it has {list(replicas)}."
        )
    if len(replicas) > REPLICATION_FACTOR_MAX:
        return Refused(ErrorCode.INVALID_REPLICATION_FACTOR, _too_many_replicas(state, len(replicas)))
    unknown = sorted(set(replicas) - state.brokers.keys())
    if unknown:
        return Refused(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"The assignment names brokers that are not there: {unknown}."
        )
    return None


def _place(state: ControllerState, command: CreateTopic, default_count: int) -> list[tuple[int, ...]] | Refused:
    if command.assignments:
        return _placed_by_caller(state, command)
    count = default_count if command.partition_count == -1 else command.partition_count
    if not 1 <= count <= PARTITIONS_PER_TOPIC_MAX:
        return Refused(
            ErrorCode.INVALID_PARTITIONS, f"A topic has 1 to {PARTITIONS_PER_TOPIC_MAX} partitions, not {count}."
        )
    factor = command.replication_factor
    if factor == 0 or factor < -1:
        return Refused(ErrorCode.INVALID_REPLICATION_FACTOR, "The replication factor must be at least 1.")
    if factor > REPLICATION_FACTOR_MAX or max(factor, 1) > len(state.brokers):
        return Refused(ErrorCode.INVALID_REPLICATION_FACTOR, _too_many_replicas(state, max(factor, 1)))
    return spread(state, count)


def _placed_by_caller(state: ControllerState, command: CreateTopic) -> list[tuple[int, ...]] | Refused:
    if command.partition_count != -1 or command.replication_factor != -1:
        return Refused(
            ErrorCode.INVALID_REQUEST,
            "Give either a partition count and a replication factor, or the assignment of every partition, not both.",
        )
    if sorted(command.assignments) != list(range(len(command.assignments))):
        return Refused(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT, "An assignment names the partitions 0, 1, 2, ... without a gap."
        )
    if len(command.assignments) > PARTITIONS_PER_TOPIC_MAX:
        return Refused(ErrorCode.INVALID_PARTITIONS, f"A topic has at most {PARTITIONS_PER_TOPIC_MAX} partitions.")
    for replicas in command.assignments.values():
        refusal = refuse_replicas(state, replicas)
        if refusal is not None:
            return refusal
    return [tuple(command.assignments[p]) for p in range(len(command.assignments))]


def _too_many_replicas(state: ControllerState, factor: int) -> str:
    if factor > len(state.brokers):
        return f"The replication factor {factor} is larger than the number of live brokers, {len(state.brokers)}."
    return (
        f"The replication factor {factor} is not supported: each partition has {REPLICATION_FACTOR_MAX} replica, "
        "on the disk of its leader. Use 1, or -1 for the default."
    )
