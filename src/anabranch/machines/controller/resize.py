"""Resizing a topic: the command that begins it, the answers that carry it on (ordering.md, section 4).

One change of a topic at a time: a resize that comes while another runs, or while empty partitions are being removed,
is answered `WaitForResize` and decided again when the topic is idle, so that it starts from the current counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import INTERNAL_TOPICS
from anabranch.base.limits import LAYOUT_NUMBER_MAX, LAYOUTS_PER_TOPIC_MAX, PARTITIONS_PER_TOPIC_MAX
from anabranch.machines.controller.effects import (
    Accepted,
    CommandReply,
    Decision,
    Refused,
    SendLeaderAndIsr,
    Validated,
    WaitForResize,
)
from anabranch.machines.controller.layouts import Layout, with_ended
from anabranch.machines.controller.nodes import Resize, Topic
from anabranch.machines.controller.plan import Plan
from anabranch.machines.controller.roles import counts, may_undo, phases
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.controller.topics import refuse_more, refuse_replicas, spread, unknown_topic


@dataclass(frozen=True, slots=True)
class ResizeTopic:
    """One topic of a CreatePartitions request; a smaller count shrinks the topic."""

    name: str
    count: int
    assignments: Sequence[Sequence[int]] | None = None
    """Brokers of the partitions from the present count to the new one, when the caller chooses."""
    validate_only: bool = False


def decide_resize_topic(
    state: ControllerState, command: ResizeTopic, per_broker_max: int | None = None
) -> Decision[CommandReply]:
    """Begin a resize: its intent, and all input that every later controller must share, becomes durable.

    `per_broker_max` is `max.partitions.per.broker`.
    """
    topic = state.topics.get(command.name)
    if topic is None or command.name in state.deleting:
        return Decision(reply=unknown_topic(command.name))
    refusal = _refuse_count(topic, command.count)
    if refusal is not None:
        return Decision(reply=refusal)
    if topic.resize is not None or topic.reaping:
        doing = "removing its empty partitions" if topic.resize is None else f"being resized to {topic.resize.to}"
        message = f"Topic {topic.name!r} is still {doing}; try again."
        return Decision(reply=WaitForResize(topic.name, ErrorCode.REASSIGNMENT_IN_PROGRESS, message))
    refusal = _refuse_change(topic, command.count)
    if refusal is not None:
        return Decision(reply=refusal)
    assignment = _assign(state, topic, command)
    if isinstance(assignment, Refused):
        return Decision(reply=assignment)
    refusal = refuse_more(state, len(assignment), per_broker_max) if assignment else None
    if refusal is not None:
        return Decision(reply=refusal)
    if command.validate_only:
        return Decision(reply=Validated())
    plan = Plan(state, topic)
    old = topic.undeleted_partition_count
    closed = {p: plan.epoch(p) for p in sorted(topic.partitions) if p >= min(old, command.count)}
    first = phases(old, command.count)[0]
    ending = topic.layouts[-1].number
    plan.topic = replace(
        topic,
        layouts=(*topic.layouts, Layout(ending + 1, command.count)),
        ended=with_ended(topic.ended, ending, closed),
        resize=Resize(to=command.count, phase=first, assignment=assignment),
    )
    plan.enter(first)
    return plan.decision(Accepted(topic.name, topic.topic_id, layout=ending + 1, count=command.count))


def decide_cancel_resize(state: ControllerState, name: str) -> Decision[CommandReply]:
    """Cancel the resize of a topic that runs, if it can be undone (`roles.may_undo`): the old count goes on to rule.

    The leaders that can be reached take records by the old count again at once; the resize need not wait for the
    others any more, which get their roles when they are back.
    """
    topic = state.topics.get(name)
    if topic is None or name in state.deleting:
        return Decision(reply=unknown_topic(name))
    if topic.resize is None:
        message = f"Topic {name!r} is not being resized; it has {topic.undeleted_partition_count} partitions."
        return Decision(reply=Refused(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, message))
    if not may_undo(topic):
        return Decision(reply=Refused(ErrorCode.REASSIGNMENT_IN_PROGRESS, _too_late(topic)))
    plan = Plan(state, topic)
    plan.undo()
    return plan.decision(Accepted(name, topic.topic_id, layout=topic.layouts[-2].number))


def _too_late(topic: Topic) -> str:
    """Why a resize cannot be canceled any more, and what to do."""
    assert topic.resize is not None
    old, new = counts(topic)
    why = (
        f"partitions {old} to {new - 1} may hold records already"
        if new > old
        else f"the remaining partitions may hold records of partitions {new} to {old - 1} already"
    )
    return (
        f"The resize of topic {topic.name!r} from {old} to {new} partitions cannot be canceled any more: {why}. "
        f"Bring back what it waits for (`anabranch topic describe {topic.name}`); then it ends, and the topic can be "
        f"resized to {old}."
    )


def decide_leader_and_isr_answered(
    state: ControllerState, effect: SendLeaderAndIsr, errors: Mapping[int, ErrorCode], now_ms: int
) -> Decision[None]:
    """A broker answered a LeaderAndIsr: an error code for each partition; one that is missing was not answered."""
    topic = state.topics.get(effect.topic)
    broker = state.brokers.get(effect.broker_id)
    if (
        topic is None
        or topic.topic_id != effect.topic_id
        or topic.name in state.deleting
        or broker is None
        or broker.epoch != effect.broker_epoch
        or effect.controller_epoch != state.controller_epoch
    ):
        return Decision(reply=None)
    plan = Plan(state, topic)
    taken = {
        role.partition: (role.layout, role.leader_epoch)
        for role in effect.roles
        if errors.get(role.partition) is ErrorCode.NONE and role.partition in topic.partitions
    }
    if taken:
        plan.note_confirmed(taken)
        plan.advance()
    if len(taken) < len(effect.roles):
        missing = (role.partition for role in effect.roles if role.partition not in taken)
        plan.note_unconfirmed({p: errors.get(p, ErrorCode.REQUEST_TIMED_OUT) for p in missing if p in topic.partitions})
        plan.retry_later(now_ms)
    return plan.decision(None)


def decide_retry(state: ControllerState, name: str) -> Decision[None]:
    """Send the unanswered and the refused orders of a topic again. The timer ("retry", name) calls it."""
    topic = state.topics.get(name)
    if topic is None:
        return Decision(reply=None)
    plan = Plan(state, topic)
    plan.send_all(unconfirmed_only=True)
    return plan.decision(None)


def _refuse_count(topic: Topic, count: int) -> Refused | None:
    """Refuse a count that no topic could have."""
    least = topic.initial_partition_count
    if topic.name in INTERNAL_TOPICS:
        return Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"Topic {topic.name!r} is internal: what it holds is placed by its partition count, which must stay.",
        )
    if count < least:
        return Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"Topic {topic.name!r} was created with {least} partitions and cannot go below that; {count} were asked "
            f"for. Ask for {least} or more.",
        )
    if count > PARTITIONS_PER_TOPIC_MAX:
        return Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"A topic has at most {PARTITIONS_PER_TOPIC_MAX} partitions; {count} were asked for.",
        )
    return None


def _refuse_change(topic: Topic, count: int) -> Refused | None:
    """Refuse a count that the topic's present one rules out."""
    if count == topic.undeleted_partition_count:
        return Refused(ErrorCode.INVALID_PARTITIONS, f"Topic {topic.name!r} already has {count} partitions.")
    if len(topic.layouts) >= LAYOUTS_PER_TOPIC_MAX:
        return Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"Topic {topic.name!r} holds records of {len(topic.layouts)} layouts, which is the most that a lineage can "
            "hold. It can be resized again when retention or DeleteRecords has removed all records of some of them.",
        )
    if topic.layouts[-1].number >= LAYOUT_NUMBER_MAX:
        return Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"Topic {topic.name!r} has been resized {LAYOUT_NUMBER_MAX} times, which is the most that the sequence of "
            "its records can tell apart. Copy it to a new topic.",
        )
    return None


def _assign(state: ControllerState, topic: Topic, command: ResizeTopic) -> dict[int, tuple[int, ...]] | Refused:
    """Choose replicas for the partitions that do not exist yet; those that open again stay where they are."""
    grown = range(topic.undeleted_partition_count, command.count)
    missing = [p for p in grown if p not in topic.partitions]
    if command.assignments is None:
        chosen = spread(state, len(missing)) if missing else []
        return chosen if isinstance(chosen, Refused) else dict(zip(missing, chosen, strict=True))
    if len(command.assignments) != len(grown):
        return Refused(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"Resizing topic {topic.name!r} to {command.count} adds {len(grown)} partitions, but "
            f"{len(command.assignments)} assignments were given.",
        )
    given = {p: tuple(replicas) for p, replicas in zip(grown, command.assignments, strict=True)}
    for partition, replicas in given.items():
        stays = topic.partitions.get(partition)
        if stays is not None and stays != replicas:
            return Refused(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                f"Partition {partition} of topic {topic.name!r} still exists and opens again where it is, on "
                f"{list(stays)}, not on {list(replicas)}.",
            )
        refusal = None if stays is not None else refuse_replicas(state, replicas)
        if refusal is not None:
            return refusal
    return {p: given[p] for p in missing}
