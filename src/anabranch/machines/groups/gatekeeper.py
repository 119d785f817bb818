"""The gates of a shard's groups: evaluated when something has changed, never because a heartbeat came (ADR 0033).

    a commit of a watched partition, a report, a leader's answer, a new lineage, another owner  ->  look, at once
    a gate is closed, or a member asks for positions                                            ->  look, every LOOK_MS

A look (`positions_asked.decide_look`) compares positions with those of the last one, evaluates the gates of topics in
which a position has passed the end of a segment, asks leaders for next records, and answers questions of members. It is
the decision of a timer, so that it sees what the decision that rang for it has changed. Everything here is soft state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar
from uuid import UUID

from anabranch.machines.groups import classic, opened_by_time, shares
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup, Member
from anabranch.machines.groups.consumer.target import subscriptions
from anabranch.machines.groups.gates import OPEN, Evaluated, Stand, can_go_on, was_reopened
from anabranch.machines.groups.group_gates import GroupGates, changes, has_free_keys, held_of, is_ours
from anabranch.machines.groups.hand_outs import HandOuts
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import Position
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.groups.standing import OPEN_END, At, Standing, readable_end
from anabranch.machines.groups.starts import Starts
from anabranch.machines.lineage import BEYOND, Frontier
from anabranch.machines.outcome import Draft, Outcome
from anabranch.machines.progress import NEVER_REWRITTEN

Group = ConsumerGroup | ClassicGroup
Reply = TypeVar("Reply")
LOOK_MS = 500
"""Between two looks at positions that a gate or a member waits for: log starts and transactions tell of no change."""
LOOKED_AT_MAX = 50
"""Watched partitions that one look compares; the others follow in the next, `LOOK_ON_MS` later."""
LOOK_ON_MS = 2
LOOK_ROOM = 300
"""What the decisions of one look may cost (`Evaluated.next`), about 4 ms; the others follow in the next."""
UNFINISHED_LOOKS_MAX = 50
"""Looks at unfinished evaluations until what is waited for is found out all the same."""


class Gatekeeper:
    """The gates of all groups of a shard."""

    def __init__(self, groups: Mapping[str, Group], offsets: Offsets, starts: Starts, regexes: Regexes) -> None:
        self.groups = groups
        self.offsets = offsets
        self.starts = starts
        self._regexes = regexes
        self._hand_outs = HandOuts(offsets, starts, regexes)
        self._of: defaultdict[str, GroupGates] = defaultdict(GroupGates)
        self._moved_by_marker: dict[str, None] = {}
        """Groups with offsets that a transaction has committed, and that are not looked at yet."""
        self.hearing: dict[UUID, dict[str, None]] = {}
        """By topic: the groups that are told where clients begin (`resets`), and others that were."""

    # -- groups --------------------------------------------------------------------------------------------------------

    def of(self, group_id: str) -> GroupGates:
        """The soft state of a group."""
        return self._of[group_id]

    def known(self, group_id: str) -> GroupGates | None:
        """The soft state of a group, if it has any."""
        return self._of.get(group_id)

    def ring(self, draft: Draft[CoordinatorRecord], group_id: str, now_ms: int, *, members_moved: bool = False) -> None:
        """Have the group looked at after this decision, if the decision changes anything that gates depend on.

        `members_moved`: a classic group may have begun a rebalance, which is no record.
        """
        gates = self._of.get(group_id)
        if gates is None or gates.is_rung:
            return
        group = self.groups.get(group_id)
        moved = members_moved and (group is None or gates.swept[1:2] != (changes(group),))
        if draft.records or gates.is_due or gates.touched or moved:
            gates.is_rung = True
            draft.set_timer(("gates", group_id), now_ms)

    def rung(
        self, outcome: Outcome[Reply, CoordinatorRecord], group_id: str, now_ms: int
    ) -> Outcome[Reply, CoordinatorRecord]:
        """The outcome, with the look that it calls for."""
        draft: Draft[CoordinatorRecord] = Draft()
        draft.add(outcome)
        self.ring(draft, group_id, now_ms)
        return draft.outcome(outcome.reply)

    def moved_by_marker(self, group_id: str, topic: str, partition: int) -> None:
        """Note that a transaction's marker has changed a committed offset; `rung_by_marker` follows."""
        gates, image = self._of.get(group_id), self.offsets.image.by_name.get(topic)
        if gates is None or image is None:
            return
        position = self.offsets.positions.get(group_id, topic, partition)
        if position is not None and gates.moved(image, partition, position.offset):
            self._moved_by_marker[group_id] = None

    def rung_by_marker(
        self, outcome: Outcome[Reply, CoordinatorRecord], now_ms: int
    ) -> Outcome[Reply, CoordinatorRecord]:
        """The outcome, with the looks that a transaction's marker calls for."""
        draft: Draft[CoordinatorRecord] = Draft()
        draft.add(outcome)
        for group_id in self._moved_by_marker:
            self.ring(draft, group_id, now_ms)
        self._moved_by_marker.clear()
        return draft.outcome(outcome.reply)

    def drop(self, group_id: str) -> None:
        """Forget the soft state of a group."""
        self._of.pop(group_id, None)
        for topic_id, groups in list(self.hearing.items()):
            groups.pop(group_id, None)
            if not groups:
                del self.hearing[topic_id]

    def spoke(self, group: ClassicGroup, member_id: str, now_ms: int) -> None:
        """Note that a member of a classic group has spoken."""
        gates = self._of.get(group.group_id)
        if gates is not None and member_id in group.members:
            gates.standing.speak(member_id, now_ms)

    def converted(self, group_id: str) -> None:
        """Forget what is known of the owners of a group that goes on under the other protocol."""
        gates = self._of.get(group_id)
        if gates is not None:
            gates.standing = Standing()
            gates.begun.clear()  # What owners have asked for was not heard all the time.
            gates.outdate(list(gates.evaluated))

    def owner(self, group: Group, gates: GroupGates) -> Callable[[At], tuple[str, int]]:
        """The function that finds the owner of a partition and its rebalance timeout.

        A shared partition has no owner: what one member tells is not the position of all its keys. Only commits are.
        """
        if isinstance(group, ConsumerGroup):
            holders, members, sharers = group.holders, group.members, group.sharers

            def consumer(at: At) -> tuple[str, int]:
                member = members.get(holders.get(at, "")) if at not in sharers else None
                return ("", 0) if member is None else (member.member_id, member.described.rebalance_timeout_ms)

            return consumer
        if gates.owners[0] != changes(group):
            gates.owners = changes(group), classic.owners(group, self.offsets.image)
            gates.begin_generation(group.generation)
            gates.forget_all_but(group.members)
            gates.outdate(list(gates.evaluated))
        known, classic_members = gates.owners[1], group.members

        def by_assignment(at: At) -> tuple[str, int]:
            member = classic_members.get(known.get(at, ""))
            return ("", 0) if member is None else (member.member_id, member.rebalance_timeout_ms)

        return by_assignment

    def holds_up(self, group: Group, gates: GroupGates, at: At, was: Position | None) -> tuple[str, int]:
        """Return the member that holds up who waits for a partition, and its rebalance timeout; ("", 0) for nobody.

        That is the owner; of a partition that is shared, a sharer whose keys are those of the lowest offset.
        """
        sharers = group.sharers.get(at) if isinstance(group, ConsumerGroup) else None
        if not sharers or not isinstance(group, ConsumerGroup):
            return self.owner(group, gates)(at)
        stands = shares.constant(-1) if was is None else was.stands
        stable = shares.stable(stands)
        for member_id in sorted(sharers):
            member = group.members.get(member_id)
            if member is not None and any(stands.lowest(keys) == stable for keys in sharers[member_id]):
                return member_id, member.described.rebalance_timeout_ms
        return "", 0

    def topics_of(self, group: Group, gates: GroupGates) -> frozenset[str]:
        """The names of the topics that a group subscribes to; none where they cannot be read."""
        if isinstance(group, ClassicGroup):
            basis: object = (group.generation, group.state)
            if gates.names[0] != basis:
                gates.names = basis, classic.subscribed_topics(group) or frozenset()
            return gates.names[1]
        basis = (self.offsets.image.version, group.epoch)
        if gates.names[0] != basis:
            gates.names = basis, subscriptions(group, self.offsets.image, self._regexes)
        return gates.names[1]

    # -- evaluating ----------------------------------------------------------------------------------------------------

    def evaluation(self, gates: GroupGates, topic: TopicImage) -> Evaluated:
        """The gates of a topic as far as they are decided; none are of a topic image that was never looked at."""
        made = gates.evaluated.get(topic.topic_id)
        if made is None or made.topic is not topic:
            made = gates.evaluated[topic.topic_id] = Evaluated(topic)
        elif made.is_outdated:
            made.outdate()
        if made.left:
            gates.is_due = True
        return made

    def decide(self, group: Group, gates: GroupGates, made: Evaluated, partitions: Iterable[int], now_ms: int) -> None:
        """Decide the gates of some partitions of a topic."""
        numbers = list(partitions)
        if made.decide(numbers, self._stand_in(group, gates, made.topic)):
            gates.version += 1
        owner = self.owner(group, gates)
        for number in numbers:
            opened_by_time.note(group, gates, made, number, owner, now_ms)
        if not isinstance(group, ConsumerGroup):
            return  # Its members assign partitions themselves.
        if made.closed or made.left:
            self.hearing.setdefault(made.topic.topic_id, {})[group.group_id] = None
        holders = group.holders
        freed = False
        for number in numbers:
            at = made.topic.topic_id, number
            if number in made.closed:
                if at not in gates.waited:
                    gates.waited[at] = made.gate_of(number)
                    if made.stands[number].committed is None:
                        gates.to_note.setdefault(at[0], set()).add(number)
            else:
                is_free = at not in holders or has_free_keys(group, at)
                freed = freed or (is_free and at not in gates.unstable)
        gates.freed += freed

    def _stand_in(self, group: Group, gates: GroupGates, topic: TopicImage) -> Callable[[int], Stand]:
        standing, owner = gates.standing, self.owner(group, gates)

        def stand(number: int) -> Stand:
            was = self.offsets.current(group.group_id, topic.name, number)
            raw = standing.raw(topic, number, None if was is None else was.offset, owner)
            passed = standing.passed(topic, number, raw, owner)
            counted: int | Frontier = passed
            if was is not None and was.frontier is not None:
                counted = shares.through(was.frontier, lambda at: standing.passed(topic, number, max(at, raw), owner))
            stall = standing.stalls.get((topic.topic_id, number))
            read: int | Frontier | None = None
            if stall is not None and self.is_stalled(group, gates, (topic.topic_id, number), was, raw):
                reached, read = max(passed, stall.reached), counted
                counted = shares.at_least(counted, reached) if isinstance(counted, Frontier) else reached
            return Stand(raw, standing.progress(topic, number, raw), passed, counted, was, read)

        return stand

    def is_stalled(self, group: Group, gates: GroupGates, at: At, was: Position | None, raw: int) -> bool:
        """Whether gates that wait on a partition open by time."""
        stall = gates.standing.stalls.get(at)
        if stall is None or stall.owner != self.holds_up(group, gates, at, was)[0]:
            return False
        return stall.raw == shares.done_below(stall.reached, raw, None if was is None else was.frontier)

    def withholds(self, group: Group, gates: GroupGates, at: At, now_ms: int) -> bool:
        """Whether a partition that nobody owns must not be handed out; True while that is not decided.

        A missing partition waits, too: a target that a member computed may be older than the metadata.
        """
        topic = self.offsets.image.by_id.get(at[0])
        if topic is None or not topic.has(at[1]):
            return True
        if not topic.was_resized:
            return False
        if topic.is_gated and self._is_closed(group, gates, topic, at, now_ms):
            return True
        if self._hand_outs.awaits_log(group.group_id, gates, topic, at[1]):
            return True
        return self._hand_outs.awaits_transaction(group.group_id, gates, topic, at[1])

    def _is_closed(self, group: Group, gates: GroupGates, topic: TopicImage, at: At, now_ms: int) -> bool:
        """Whether the next record of a partition lies behind a closed gate, or may."""
        made = self.evaluation(gates, topic)
        if at[1] in made.left:
            self.decide(group, gates, made, [at[1]], now_ms)
        if at[1] in made.closed:
            return True
        if at[1] not in made.verdicts or self._is_sure(gates, made, at[1]):
            return False
        if at not in gates.unsure:
            gates.unsure[at] = None
            gates.is_due = True
        return True

    def _is_sure(self, gates: GroupGates, made: Evaluated, partition: int) -> bool:
        """Whether the leader has said where the next record of a partition is."""
        first = max(made.stands[partition].raw, made.topic.log_start(partition))
        return gates.standing.is_sure((made.topic.topic_id, partition), first)

    def takes(self, group: ConsumerGroup, gates: GroupGates, at: At) -> bool:
        """Whether an owned partition must be taken away: it re-opened behind a closed gate, and is read to there."""
        topic, made = self.offsets.image.by_id.get(at[0]), gates.evaluated.get(at[0])
        if made is None or made.topic is not topic or not topic.is_gated or at[1] in made.left:
            return False
        return (
            made.verdicts.get(at[1], OPEN).is_reopened
            and self._hand_outs.is_read_to(group.group_id, gates, made, at[1])
            and not self._hand_outs.awaits_transaction(group.group_id, gates, topic, at[1])
        )

    # -- handing out ---------------------------------------------------------------------------------------------------

    def handed_out(
        self, group: ConsumerGroup, before: Member, after: Member, now_ms: int
    ) -> Iterator[CoordinatorRecord]:
        """Note a change of a member's assignment; the positions to write before the member learns of it."""
        gates = self.of(group.group_id)
        yield from self._hand_outs.changed(group, gates, before, after, partial(self.takes, group, gates), now_ms)
        for topic_id in gates.begun:
            self.hearing.setdefault(topic_id, {})[group.group_id] = None

    def note_waits(self, group_id: str, gates: GroupGates) -> Iterator[CoordinatorRecord]:
        """What to write of partitions that have begun to wait."""
        yield from self._hand_outs.note_waits(group_id, gates)

    def forget(self, group_id: str, member_id: str, *, but: Iterable[At] = ()) -> None:
        """Drop what is known of the partitions that a member no longer owns."""
        gates = self._of.get(group_id)
        if gates is not None:
            gates.idle.pop(member_id, None)
            if not but:
                gates.questions.replied.pop(member_id, None)
            gates.outdate(gates.standing.forget(member_id, but=but))

    # -- changes -------------------------------------------------------------------------------------------------------

    def topics_changed(self, group_id: str) -> None:
        """Note that topics have changed; whether partitions came or went or not, their layouts may have."""
        gates, by_id = self._of.get(group_id), self.offsets.image.by_id
        if gates is not None and any(by_id.get(at) is not made.topic for at, made in gates.evaluated.items()):
            gates.is_due = True

    def committed(self, group_id: str, topic: TopicImage, partition: int, position: Position) -> None:
        """Note that an offset is about to be committed.

        A coordinator that has just loaded the group looks first: a gate that this commit opens was closed, and what
        waited there must not be begun where the client's reset says.
        """
        group = self.groups.get(group_id)
        if topic.is_gated and isinstance(group, ConsumerGroup) and group.members:
            self._look_first(group, topic, position.committed_at_ms)
        gates = self._of.get(group_id)
        if gates is None:
            return
        at = topic.topic_id, partition
        gates.standing.tenures.pop(at, None)
        gates.has_begun(at)
        stall, frontier = gates.standing.stalls.get(at), position.frontier
        if stall is not None and (
            frontier is None or stall.raw != shares.done_below(stall.reached, position.offset, frontier)
        ):  # Of a shared partition, a commit of a sharer that is further is no move.
            del gates.standing.stalls[at]
            gates.outdate([topic.topic_id])
        gates.moved(topic, partition, position.offset)

    def _look_first(self, group: ConsumerGroup, topic: TopicImage, now_ms: int) -> None:
        """Decide the gates of a topic that was not looked at yet, as many as one look decides."""
        gates = self.of(group.group_id)
        if topic.topic_id not in gates.evaluated:
            made = self.evaluation(gates, topic)
            self.decide(group, gates, made, made.next(LOOK_ROOM)[0], now_ms)
            gates.is_due = True

    def positions_gone(self, group_id: str) -> None:
        """Note that committed offsets of a group are gone, as they were not used for long."""
        gates = self._of.get(group_id)
        if gates is not None:
            gates.outdate(list(gates.evaluated))

    def deleted(self, group_id: str, partitions: Iterable[At]) -> None:
        """Note that offsets were deleted for a group to begin anew: where a former owner stood counts no more."""
        gates = self._of.get(group_id)
        if gates is not None:
            gates.standing.begin_anew(partitions)
            gates.outdate(list(gates.evaluated))

    def answered(self, group_id: str, topic_id: UUID, asked: Mapping[int, int], found: Mapping[int, int]) -> None:
        """Take the leaders' answers; a partition without one is asked about again at a later look."""
        gates = self._of.get(group_id)
        if gates is None:
            return
        topic = self.offsets.image.by_id.get(topic_id)
        ends = {number: gates.asking.pop((topic_id, number), None) for number in asked}
        for number, end in ends.items():
            if end is not None:
                gates.touched[topic_id, number] = None
            elif topic is not None:
                ends[number] = readable_end(topic, number)
        for number, next_record in found.items():
            at, end = (topic_id, number), ends[number]
            rewritten = NEVER_REWRITTEN if topic is None else topic.rewritten(number)
            if not gates.standing.answered(
                at, asked[number], next_record, BEYOND if end is None else end, rewritten=rewritten
            ):
                continue
            gates.touched[at] = None
            if at in gates.unsure:
                del gates.unsure[at]
                gates.version += 1
            made = gates.evaluated.get(topic_id)
            if made is not None and number in made.verdicts:
                made.doubt(number)  # its next record may lie behind another gate, and a heartbeat come before the look

    # -- the work of a look --------------------------------------------------------------------------------------------

    def refresh(self, group: Group, gates: GroupGates, now_ms: int, room: int = LOOK_ROOM) -> int:
        """Decide gates of the topics that the group subscribes to, and find out what is waited for.

        Return what is left of `room`. What is waited for is of interest when all gates are decided.
        """
        unfinished = False
        by_id = self.offsets.image.by_id
        self._hand_outs.look_at_transactions(group.group_id, gates)
        if gates.image_version != self.offsets.image.version:
            gates.image_version = self.offsets.image.version
            gone = [topic_id for topic_id in gates.topic_ids if topic_id not in by_id]
            gates.forget_topics(gone)
            gates.forget_gates([topic_id for topic_id in gates.evaluated if not by_id[topic_id].is_gated])
            for topic_id, begun in list(gates.begun.items()):
                has = by_id[topic_id].has
                for number in [number for number in begun if not has(number)]:
                    gates.has_begun((topic_id, number))
            gates.forget_waits(lambda at: at[0] in by_id and by_id[at[0]].has(at[1]))
            for topic_id in gone:
                self.hearing.pop(topic_id, None)
        for name in sorted(self.topics_of(group, gates)):
            topic = self.offsets.image.by_name.get(name)
            if topic is not None and topic.is_gated:
                made = self.evaluation(gates, topic)
                some, room = made.next(room)
                self.decide(group, gates, made, some, now_ms)
                unfinished |= bool(made.left)
        basis = (gates.version, changes(group), gates.questions.changes, len(gates.unsure), len(gates.standing.stalls))
        gates.unfinished = gates.unfinished + 1 if unfinished and gates.unfinished < UNFINISHED_LOOKS_MAX else 0
        if basis != gates.based_on and not gates.unfinished:
            gates.based_on = basis
            self._find_wanted(group, gates, now_ms)
        gates.is_due = unfinished  # A topic that nobody subscribes to any more is left as it is.
        return room

    def _find_wanted(self, group: Group, gates: GroupGates, now_ms: int) -> None:
        owner = self.owner(group, gates)
        wanted: dict[At, int] = dict.fromkeys(gates.questions.askers, -1)
        inner: dict[At, None] = dict.fromkeys((*gates.unsure, *gates.standing.stalls))
        held = held_of(group.holders if isinstance(group, ConsumerGroup) else ())
        asked = held_of(wanted)
        gates.taking = False
        for topic_id, made in gates.evaluated.items():
            lineage, held_here = made.topic.lineage, held.get(topic_id, frozenset())
            assert lineage is not None
            decided = () if made.left or made.is_outdated else made.by_time
            for number in decided:  # Another member may have got it since, or its owner ask only now.
                opened_by_time.note(group, gates, made, number, owner, now_ms)
            for number, verdict in made.verdicts.items():
                if verdict.is_closed:  # If it is held, too: while it is closed, the time of its owner does not count.
                    gates.taking |= verdict.is_reopened
                elif number in held_here:
                    layout = lineage.layout_at(number, verdict.ahead)
                    if was_reopened(lineage, number, layout, verdict.ahead):
                        inner[topic_id, number] = None
            for number, offset in made.needed(asked.get(topic_id, frozenset())).items():
                wanted[topic_id, number] = offset
        gates.freed += gates.taking
        gates.wanted, gates.inner = wanted, inner
        gates.wanted_of = {}
        for at in wanted:
            member_id, _ = owner(at)
            if member_id:
                gates.wanted_of.setdefault(member_id, []).append(at)
        gates.standing.unwatch((*wanted, *inner), now_ms)
        gates.asked = {at: last for at, last in gates.asked.items() if at in wanted or at in inner}

    def compare(self, group: Group, gates: GroupGates, now_ms: int) -> tuple[set[At], dict[UUID, dict[int, int]], bool]:
        """Compare watched positions with those of the last look: which changed, what to ask leaders, what is left."""
        everything = [*gates.wanted, *gates.inner]
        gates.cursor = gates.cursor if gates.cursor < len(everything) else 0
        some = everything[gates.cursor : gates.cursor + LOOKED_AT_MAX]
        gates.cursor += len(some)
        owner = self.owner(group, gates)
        gates.standing.stand_still(_is_rebalancing(group), now_ms)
        moved: set[At] = set()
        asks: dict[UUID, dict[int, int]] = {}
        touched = gates.take_touched(LOOKED_AT_MAX)
        for at in dict.fromkeys((*touched, *some)):
            topic = self.offsets.image.by_id.get(at[0])
            if topic is None or not topic.has(at[1]):
                continue
            made = gates.evaluated.get(at[0])
            was = self.offsets.current(group.group_id, topic.name, at[1])
            is_shared = was is not None and was.frontier is not None  # It may have moved above the stable offset.
            if at in touched and made is not None and (is_shared or at[1] in made.verdicts):
                made.moved(at[1], self._stand_in(group, gates, topic)(at[1]))
                gates.freed += made.verdicts.get(at[1], OPEN).is_reopened  # It may be known now to be read to its gate.
                gates.is_due = True
            if at in gates.wanted or at in gates.inner:
                if self._compare_one(group, gates, topic, at, owner, now_ms):
                    moved.add(at)
                self._ask(gates, topic, at, asks, now_ms)
        return moved, asks, gates.cursor < len(everything) or bool(gates.touched)

    def _compare_one(
        self,
        group: Group,
        gates: GroupGates,
        topic: TopicImage,
        at: At,
        owner: Callable[[At], tuple[str, int]],
        now_ms: int,
    ) -> bool:
        standing, number = gates.standing, at[1]
        was = self.offsets.current(group.group_id, topic.name, number)
        is_shared = isinstance(group, ConsumerGroup) and at in group.sharers
        member_id, timeout_ms = self.holds_up(group, gates, at, was)
        timed = member_id if self._has_learned(group, standing, member_id, at) else ""
        begins = was is None and timed and not is_shared and at not in standing.tenures and at not in standing.reports
        made = gates.evaluated.get(at[0])
        if is_ours(group, gates, member_id):
            standing.tenures.pop(at, None)
        elif begins and not self.starts.reads_from_beginning(group.group_id, topic.topic_id):
            standing.begin_tenure(topic, number, member_id, timeout_ms, now_ms, is_whole=False)
        raw = standing.raw(topic, number, None if was is None else was.offset, owner)
        position = standing.passed(topic, number, raw, owner)
        timed = timed if can_go_on(topic, made, number, position) else ""
        need = gates.wanted.get(at, -1)
        frontier = None if was is None else was.frontier
        stall = standing.stalls.get(at)
        done = shares.done_below(max(need, -1 if stall is None else stall.reached), raw, frontier)
        is_left = made is not None and number in made.left
        until = None if is_left else self._is_given_until(gates, made, number, member_id)
        log_end = topic.log_end(number)
        division = dict(group.sharers[at]) if isinstance(group, ConsumerGroup) and is_shared else None
        moved = standing.look(at, done, position, timed, now_ms, log_end=log_end, until=until, division=division)
        if stall is not None and at not in standing.stalls:
            gates.outdate([at[0]])
        if moved and made is not None:
            self._take(group, gates, made, number, raw, position)
        if at not in gates.wanted or is_left or not standing.is_overdue(at, timeout_ms, need, log_end, now_ms):
            return moved
        if standing.stall(at, max(need, position), lambda reached: shares.done_below(reached, raw, frontier)):
            if made is not None:
                made.moved(number, self._stand_in(group, gates, topic)(number))
                gates.is_due = True
            return True
        return moved

    def _is_given_until(self, gates: GroupGates, made: Evaluated | None, number: int, member_id: str) -> int:
        """The offset from which on the owner is given nothing: one of ours stops at its next closed gate.

        Of a closed partition it can have no more than what it holds of records that are gone.
        """
        if made is not None and number in made.closed:
            return made.stands[number].position
        gate = made.own_gate(number) if made is not None and gates.questions.has_asked(member_id) else None
        return OPEN_END if gate is None else gate

    def _has_learned(self, group: Group, standing: Standing, member_id: str, at: At) -> bool:
        """Whether a member knows that it owns a partition; of a classic group all do when a generation is handed out.

        Between two generations a member may have let go of all, and have joined again: its time begins with the next.
        """
        if isinstance(group, ClassicGroup):
            return group.state is classic.ClassicState.STABLE
        member = group.members.get(member_id)
        return member is None or member.described.classic is not None or standing.has_learned(member_id, at)

    def _take(self, group: Group, gates: GroupGates, made: Evaluated, number: int, raw: int, position: int) -> None:
        """Have the gates decided anew that a moved position may have opened or closed."""
        if made.is_behind(number, raw):
            gates.outdate([made.topic.topic_id])
        elif made.crosses(number, position):
            made.moved(number, self._stand_in(group, gates, made.topic)(number))
            gates.is_due = True

    def _ask(self, gates: GroupGates, topic: TopicImage, at: At, asks: dict[UUID, dict[int, int]], now_ms: int) -> None:
        """Ask the leader for the next record where records may be left: one question at a time, the same in LOOK_MS."""
        watch = gates.standing.watches[at]
        need = gates.wanted.get(at, -1)
        if watch.position >= (topic.log_end(at[1]) if need < 0 else need) and at not in gates.unsure:
            return
        position = max(watch.position, topic.log_start(at[1]))
        offset, asked_ms = gates.asked.get(at, (-1, 0))
        if at in gates.asking or (position == offset and now_ms - asked_ms < LOOK_MS):
            return
        gates.asked[at] = position, now_ms
        gates.asking[at] = readable_end(topic, at[1])
        asks.setdefault(at[0], {})[at[1]] = position


def _is_rebalancing(group: Group) -> bool:
    """Whether nobody knows who is the next owner of a partition."""
    return isinstance(group, ClassicGroup) and group.state is not classic.ClassicState.STABLE
