"""One member, one step towards its target (KIP-848, Reconciliation of a member).

    from                  | when                                             | to                    | epoch
    any                   | it has partitions outside its target             | UNREVOKED_PARTITIONS  | stays
    UNREVOKED_PARTITIONS  | it has not acknowledged the revocation           | UNREVOKED_PARTITIONS  | stays
    any, nothing to lose  | part of its target is held by others, or waits   | UNRELEASED_PARTITIONS | target's
    any, nothing to lose  | all of its target is free                        | STABLE                | target's

The rule: a partition is assigned only when no member holds it, and a member holds a partition it is revoking until the
partitions it reports to own lack it. So no partition ever has two owners, whatever is lost, repeated or late.

A free partition also waits while records of its keys are unread elsewhere in the topic's lineage
(ordering.md, section 8): to its member it is pending just the same. `takes` names partitions that their owner must
revoke although they are in its target: they re-opened behind a closed gate, and are handed out again when it opens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from uuid import UUID

from anabranch.machines.groups.consumer.group import (
    NOTHING,
    Assignment,
    ConsumerGroup,
    Member,
    MemberState,
    assignment_of,
    sets_of,
)

Waits = Callable[[UUID, int], bool]
"""Whether a partition waits at a gate."""


Free = Callable[[UUID, Set[int]], Set[int]]
"""Of some partitions of a topic those that may not wait; all others wait."""


def every_partition(topic_id: UUID, numbers: Set[int]) -> Set[int]:
    """The `Free` of a group without gates."""
    del topic_id
    return numbers


def reconcile(
    group: ConsumerGroup,
    member: Member,
    owned: Assignment | None,
    waits: Waits,
    takes: Waits | None = None,
    free: Free = every_partition,
) -> Member:
    """The member after one step; itself without a step. `owned` are the partitions it reports, None if not reported."""
    target_epoch = group.target_epoch
    if member.state is MemberState.STABLE and member.epoch == target_epoch and takes is None:
        return member
    if member.state is MemberState.UNREVOKED_PARTITIONS and (owned is None or _shares(owned, member.revoking)):
        return member
    has = sets_of(member.assigned)
    wanted = sets_of(group.target(member.member_id))
    kept = {topic_id: numbers & wanted.get(topic_id, set()) for topic_id, numbers in has.items()}
    if takes is not None:
        kept = {topic_id: {n for n in numbers if not takes(topic_id, n)} for topic_id, numbers in kept.items()}
    lost = {topic_id: numbers - kept[topic_id] for topic_id, numbers in has.items()}
    if any(lost.values()) and (owned is None or _shares(owned, assignment_of(lost))):
        return replace(
            member,
            state=MemberState.UNREVOKED_PARTITIONS,
            previous_epoch=member.epoch,
            assigned=assignment_of(kept),
            revoking=assignment_of(lost),
        )
    missing = False
    for topic_id, numbers in wanted.items():
        mine = kept.setdefault(topic_id, set())
        more = numbers - mine
        asked = free(topic_id, more)
        missing |= len(asked) < len(more)
        for partition in asked:
            holder = group.holders.get((topic_id, partition), member.member_id)
            if holder == member.member_id and not waits(topic_id, partition):
                mine.add(partition)
            else:
                missing = True
    after = replace(
        member,
        state=MemberState.UNRELEASED_PARTITIONS if missing else MemberState.STABLE,
        epoch=target_epoch,
        previous_epoch=member.previous_epoch if member.epoch == target_epoch else member.epoch,
        assigned=assignment_of(kept),
        revoking=NOTHING,
    )
    return member if _unchanged(after, member) else after


def pending(group: ConsumerGroup, member: Member) -> Assignment:
    """The partitions of the member's target that it does not have yet."""
    has: Mapping[UUID, set[int]] = sets_of(member.assigned)
    target = group.target(member.member_id)
    return assignment_of({topic_id: set(numbers) - has.get(topic_id, set()) for topic_id, numbers in target})


def is_subset(part: Assignment, whole: Assignment) -> bool:
    """Whether everything in `part` is in `whole`."""
    larger = sets_of(whole)
    return all(set(numbers) <= larger.get(topic_id, set()) for topic_id, numbers in part)


def _shares(one: Assignment, other: Assignment) -> bool:
    partitions = sets_of(other)
    return any(not partitions.get(topic_id, set()).isdisjoint(numbers) for topic_id, numbers in one)


def _unchanged(after: Member, before: Member) -> bool:
    return (
        after.epoch == before.epoch
        and after.state is before.state
        and after.revoking == before.revoking
        and sets_of(after.assigned) == sets_of(before.assigned)
    )
