"""One member, one step towards its target (KIP-848, Reconciliation of a member).

    from                  | when                                             | to                    | epoch
    any                   | it has partitions outside its target             | UNREVOKED_PARTITIONS  | stays
    UNREVOKED_PARTITIONS  | it has not acknowledged the revocation           | UNREVOKED_PARTITIONS  | stays
    any, nothing to lose  | part of its target is held by others, or waits   | UNRELEASED_PARTITIONS | target's
    any, nothing to lose  | all of its target is free                        | STABLE                | target's

The rule: a partition is assigned only when no member holds it, and a member holds a partition it is revoking until the
partitions it reports to own lack it. So no partition ever has two owners, whatever is lost, repeated or late.

A report is older than what its own answer tells. A Java consumer says that it owns nothing while it does not know the
names of its topics, and then takes all that it was assigned before, although the answer assigns it less. So a report
releases what the member was never told to revoke only where it has all that the member keeps (`may_be_taking`).

A partition that is shared moves in the same way, by its keys: a member that has to give some of them up revokes these
and keeps the others, and keys are assigned when no member holds them.

A free partition also waits while records of its keys are unread elsewhere in the topic's lineage
(ordering.md, section 8): to its member it is pending just the same. `takes` names partitions that their owner must
revoke although they are in its target: they re-opened behind a closed gate, and are handed out again when it opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
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
from anabranch.machines.groups.consumer.shares import NO_SHARES, At, Shares, is_covered, overlap, shares_of
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, union, without

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
    owned_shares: Shares = NO_SHARES,
    may_be_taking: bool = False,
) -> Member:
    """The member after one step; itself without a step. `owned` are the partitions it reports, None if not reported.

    `may_be_taking`: it can be on its way to own what it was assigned before, and report what it owned until then.
    """
    target_epoch = group.target_epoch
    if member.state is MemberState.STABLE and member.epoch == target_epoch and takes is None:
        return member
    if member.state is MemberState.UNREVOKED_PARTITIONS and (
        owned is None or overlap(owned, owned_shares, member.revoking, member.revoking_shares)
    ):
        return member
    has = sets_of(member.assigned)
    wanted = sets_of(group.target(member.member_id))
    shares = group.target_shares.get(member.member_id, NO_SHARES)
    is_cut = shares or member.shares or member.revoking_shares
    cut = _Cut(group, member, has, wanted, shares) if is_cut else None
    kept = {topic_id: numbers & wanted.get(topic_id, set()) for topic_id, numbers in has.items()}
    if takes is not None:
        kept = {topic_id: {n for n in numbers if not takes(topic_id, n)} for topic_id, numbers in kept.items()}
        if cut is not None:
            cut.take(takes)
    lost = {topic_id: numbers - kept[topic_id] for topic_id, numbers in has.items()}
    if any(lost.values()) or (cut is not None and cut.lost):
        revoking, revoking_shares = (assignment_of(lost), NO_SHARES) if cut is None else joined(lost, cut.lost)
        assigned, shares = (assignment_of(kept), NO_SHARES) if cut is None else joined(kept, cut.kept)
        if (
            owned is None
            or overlap(owned, owned_shares, revoking, revoking_shares)
            or (may_be_taking and not is_subset(assigned, owned, shares, owned_shares))
        ):
            return replace(
                member,
                state=MemberState.UNREVOKED_PARTITIONS,
                previous_epoch=member.epoch,
                assigned=assigned,
                revoking=revoking,
                shares=shares,
                revoking_shares=revoking_shares,
            )
    missing = cut is not None and cut.hand_out(waits, free)
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
    assigned, shares = (assignment_of(kept), NO_SHARES) if cut is None else joined(kept, cut.kept)
    after = replace(
        member,
        state=MemberState.UNRELEASED_PARTITIONS if missing else MemberState.STABLE,
        epoch=target_epoch,
        previous_epoch=member.previous_epoch if member.epoch == target_epoch else member.epoch,
        assigned=assigned,
        revoking=NOTHING,
        shares=shares,
        revoking_shares=NO_SHARES,
    )
    return member if _unchanged(after, member) else after


class _Cut:
    """The partitions that a member has, or is to have, in part, by key. They are taken out of `has` and `wanted`."""

    __slots__ = ("_group", "_has", "_member", "_wanted", "kept", "lost")

    def __init__(
        self,
        group: ConsumerGroup,
        member: Member,
        has: dict[UUID, set[int]],
        wanted: dict[UUID, set[int]],
        target: Shares,
    ) -> None:
        self._group, self._member = group, member
        self.kept: dict[At, Ranges] = {}
        self.lost: dict[At, Ranges] = {}
        shared = dict.fromkeys(at for at, _ in (*member.shares, *member.revoking_shares, *target))
        self._has = _taken_out(shared, has, dict(member.shares))
        self._wanted = _taken_out(shared, wanted, dict(target))
        for at, ranges in self._has.items():
            kept = common(ranges, self._wanted.get(at, NONE))
            # A member that takes no parts cannot keep one until the rest of the partition is free.
            self.kept[at] = kept if member.described.allow_key_share or kept == WHOLE else NONE
        self._lose()

    def _lose(self) -> None:
        lost = {at: without(ranges, self.kept[at]) for at, ranges in self._has.items()}
        self.lost = {at: ranges for at, ranges in lost.items() if ranges}

    def take(self, takes: Waits) -> None:
        """Keep nothing of partitions that must be revoked whole."""
        self.kept = {at: NONE if takes(*at) else ranges for at, ranges in self.kept.items()}
        self._lose()

    def hand_out(self, waits: Waits, free: Free) -> bool:
        """Add the keys of the target that no member holds; whether any are missing."""
        missing = False
        for at, wanted in self._wanted.items():
            mine = self.kept.get(at, NONE)
            more = without(wanted, mine)
            if not more:
                continue
            if not free(at[0], {at[1]}) or waits(*at):
                missing = True
                continue
            given = without(more, self._held_by_others(at))
            after = union(mine, given)
            if after != WHOLE and not self._member.described.allow_key_share:
                after = NONE
            self.kept[at] = after
            missing |= after != wanted
        return missing

    def _held_by_others(self, at: At) -> Ranges:
        """The keys of a partition that other members hold."""
        mine, held = self._member.member_id, NONE
        sharers = self._group.sharers.get(at, {})
        for member_id, ranges in sharers.items():
            if member_id != mine:
                held = union(held, ranges)
        holder = self._group.holders.get(at, mine)
        return held if holder == mine or holder in sharers else WHOLE


def _taken_out(shared: Iterable[At], sets: dict[UUID, set[int]], shares: Mapping[At, Ranges]) -> dict[At, Ranges]:
    """Move shared partitions out of sets; return what is had of them."""
    found: dict[At, Ranges] = {}
    for at in shared:
        numbers = sets.get(at[0], set())
        if at[1] in numbers:
            numbers.discard(at[1])
            found[at] = shares.get(at, WHOLE)
    return found


def joined(partitions: Mapping[UUID, Set[int]], parts: Mapping[At, Ranges]) -> tuple[Assignment, Shares]:
    """The assignment and the shares of partitions that are had whole, and of `parts`."""
    if not parts:
        return assignment_of(partitions), NO_SHARES
    sets = {topic_id: set(numbers) for topic_id, numbers in partitions.items()}
    for (topic_id, number), ranges in parts.items():
        if ranges:
            sets.setdefault(topic_id, set()).add(number)
    return assignment_of(sets), shares_of(parts)


def pending(group: ConsumerGroup, member: Member) -> Assignment:
    """The partitions of the member's target that it does not have yet."""
    return pending_parts(group, member)[0]


def pending_parts(group: ConsumerGroup, member: Member) -> tuple[Assignment, Shares]:
    """The partitions, and keys, of the member's target that it does not have yet."""
    has: Mapping[UUID, set[int]] = sets_of(member.assigned)
    target, shares = group.target(member.member_id), group.target_shares.get(member.member_id, NO_SHARES)
    lacking = {topic_id: set(numbers) - has.get(topic_id, set()) for topic_id, numbers in target}
    if not shares and not member.shares:
        return assignment_of(lacking), NO_SHARES
    wanted = sets_of(target)
    shared = dict.fromkeys(at for at, _ in (*member.shares, *shares))
    mine = _taken_out(shared, {**has}, dict(member.shares))
    parts = {at: without(ranges, mine.get(at, NONE)) for at, ranges in _taken_out(shared, wanted, dict(shares)).items()}
    return joined({topic_id: numbers & wanted.get(topic_id, set()) for topic_id, numbers in lacking.items()}, parts)


def is_subset(
    part: Assignment, whole: Assignment, part_shares: Shares = NO_SHARES, whole_shares: Shares = NO_SHARES
) -> bool:
    """Whether everything in `part` is in `whole`."""
    larger = sets_of(whole)
    return all(set(numbers) <= larger.get(topic_id, set()) for topic_id, numbers in part) and is_covered(
        part, part_shares, whole, whole_shares
    )


def _unchanged(after: Member, before: Member) -> bool:
    return (
        after.epoch == before.epoch
        and after.state is before.state
        and after.revoking == before.revoking
        and after.shares == before.shares
        and after.revoking_shares == before.revoking_shares
        and sets_of(after.assigned) == sets_of(before.assigned)
    )
