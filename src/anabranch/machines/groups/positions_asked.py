"""ConsumerGroupPosition (API 10001) decided: reports taken, questions answered or parked; and the look at what changed.

A report counts when the member owns the partition and the position is neither below the commit nor beyond the log end.
A question is answered with REBALANCE_IN_PROGRESS when a heartbeat of the member would change its assignment, so that a
partition whose gate has just opened is handed out at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import TOPIC_NAME_LENGTH_MAX
from anabranch.machines.groups.classic import ClassicGroup, ClassicState
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.reconcile import reconcile
from anabranch.machines.groups.gate import Gate
from anabranch.machines.groups.gate_effects import AskNextRecords
from anabranch.machines.groups.gatekeeper import LOOK_MS, LOOK_ON_MS, Gatekeeper, Group
from anabranch.machines.groups.group_gates import GroupGates, changes
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.questions import Question, Told, named, refused, wait_ms
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.groups.standing import At, Report
from anabranch.machines.outcome import Draft, Outcome, Parked
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionResponse,
)

SPARE_PARTITIONS = 1_000
"""Topics and partitions that a question may name beyond twice the partitions of the group's subscription."""
Answered = Outcome[ConsumerGroupPositionResponse | Parked, CoordinatorRecord]


class AskedPositions:
    """The requests of a coordinator that are about positions of others."""

    settings: GroupSettings
    keeper: Gatekeeper

    def consumer_group_position(self, request: ConsumerGroupPositionRequest, ticket: Hashable, now_ms: int) -> Answered:
        """Take positions that a member reports, and tell it those that it needs."""
        return decide_position(self.keeper, self.settings, request, ticket, now_ms)

    def position_dropped(self, group_id: str, member_id: str, ticket: Hashable) -> Outcome[None, CoordinatorRecord]:
        """Forget a parked question whose connection is closed."""
        gates = self.keeper.known(group_id)
        question = None if gates is None else gates.questions.parked.get(member_id)
        if gates is not None and question is not None and question.ticket == ticket:
            gates.questions.end(member_id)
        return Outcome(None)

    def next_records(
        self, group_id: str, topic_id: UUID, asked: Mapping[int, int], found: Mapping[int, int], now_ms: int
    ) -> Outcome[None, CoordinatorRecord]:
        """Take leaders' answers to `AskNextRecords`: by partition the offset asked about, and the next record."""
        draft: Draft[CoordinatorRecord] = Draft()
        self.keeper.answered(group_id, topic_id, asked, found)
        self.keeper.ring(draft, group_id, now_ms)
        return draft.outcome(None)


def decide_position(
    keeper: Gatekeeper, settings: GroupSettings, request: ConsumerGroupPositionRequest, ticket: Hashable, now_ms: int
) -> Answered:
    """Take a member's reports, and answer its question or park it."""
    group = keeper.groups.get(request.group_id)
    error = _error(group, request)
    draft: Draft[CoordinatorRecord] = Draft()
    if error is not ErrorCode.NONE or group is None:
        return draft.outcome(refused(error))
    gates, member_id = keeper.of(request.group_id), request.member_id
    if _is_too_large(keeper, group, gates, request):
        return draft.outcome(refused(ErrorCode.INVALID_REQUEST))
    before = gates.questions.end(member_id)
    if before is not None:
        draft.answer(before.ticket, _reply(keeper, group, gates, before))
    gates.standing.speak(member_id, now_ms)
    question = _taken(keeper, group, gates, request, ticket, now_ms)
    timeout_ms = _session_timeout_ms(group, settings, member_id)
    question.deadline_ms = now_ms + wait_ms(request, timeout_ms)
    gates.questions.park(question)
    keeper.refresh(group, gates, now_ms)
    found = _answer(keeper, group, gates, question, now_ms)
    if found is not None or question.deadline_ms <= now_ms:
        gates.questions.end(member_id)
        draft.answer(ticket, found or _reply(keeper, group, gates, question))
    gates.is_due = True
    keeper.ring(draft, request.group_id, now_ms)
    return draft.outcome_for(ticket)


def decide_look(keeper: Gatekeeper, group_id: str, now_ms: int) -> Outcome[None, CoordinatorRecord]:
    """Look at a group: compare positions, evaluate gates, ask leaders, answer questions; time the next look."""
    draft: Draft[CoordinatorRecord] = Draft()
    gates = keeper.known(group_id)
    if gates is None:
        return draft.outcome(None)
    group = keeper.groups.get(group_id)
    if group is None or not group.members:
        for member_id in list(gates.questions.parked):
            _end(gates, draft, member_id, refused(ErrorCode.UNKNOWN_MEMBER_ID))
        keeper.drop(group_id)
        return draft.outcome(None)
    gates.is_due = gates.is_rung = False
    room = keeper.refresh(group, gates, now_ms)
    wanted_before = gates.based_on
    moved, asks, more = keeper.compare(group, gates, now_ms)
    keeper.refresh(group, gates, now_ms, room)
    draft.write(*keeper.note_waits(group_id, gates))
    for opened in gates.take_opened():
        draft.perform(opened)
    for topic_id, offsets in asks.items():
        name = keeper.offsets.image.name_of(topic_id)
        draft.perform(AskNextRecords(group_id, topic_id, name, offsets))
    _sweep(keeper, group, gates, moved, draft, now_ms, everything=wanted_before != gates.based_on)
    again_ms = [now_ms + LOOK_ON_MS] if more or gates.is_due else []
    if gates.wanted or gates.inner or gates.unstable:
        again_ms.append(now_ms + LOOK_MS)
    again_ms += (question.deadline_ms for question in gates.questions.parked.values())
    if again_ms:
        draft.set_timer(("gates", group_id), max(now_ms + 1, min(again_ms)))
    return draft.outcome(None)


def _sweep(
    keeper: Gatekeeper,
    group: Group,
    gates: GroupGates,
    moved: Iterable[At],
    draft: Draft[CoordinatorRecord],
    now_ms: int,
    *,
    everything: bool,
) -> None:
    """End the questions that have an answer, or whose time is up."""
    parked = gates.questions.parked
    state = (gates.version, changes(group), gates.based_on, gates.freed)
    if everything or state != gates.swept:
        candidates = set(parked)
        gates.swept = state
    else:
        candidates = {member_id for at in moved for member_id in gates.questions.askers.get(at, ())}
        candidates |= {question.member_id for question in parked.values() if question.deadline_ms <= now_ms}
    for member_id in sorted(candidates):
        question = parked[member_id]
        found = _answer(keeper, group, gates, question, now_ms)
        if found is None and question.deadline_ms <= now_ms:
            found = _reply(keeper, group, gates, question)
        if found is not None:
            _end(gates, draft, member_id, found)


def _end(
    gates: GroupGates, draft: Draft[CoordinatorRecord], member_id: str, reply: ConsumerGroupPositionResponse
) -> None:
    question = gates.questions.end(member_id)
    assert question is not None
    draft.answer(question.ticket, reply)


# -- one question ------------------------------------------------------------------------------------------------------


def _error(group: Group | None, request: ConsumerGroupPositionRequest) -> ErrorCode:
    """The error for a question under this member id and epoch, as for a heartbeat."""
    if not request.group_id:
        return ErrorCode.INVALID_GROUP_ID
    member = None if group is None else group.members.get(request.member_id)
    if group is None or member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    epoch = request.generation_id
    if isinstance(group, ClassicGroup):
        if epoch != group.generation:
            return ErrorCode.ILLEGAL_GENERATION
        preparing = group.state is ClassicState.PREPARING_REBALANCE
        return ErrorCode.REBALANCE_IN_PROGRESS if preparing else ErrorCode.NONE
    now = group.members[request.member_id]
    if epoch == now.epoch:
        return ErrorCode.NONE
    if now.described.classic is not None:
        return ErrorCode.ILLEGAL_GENERATION
    return ErrorCode.STALE_MEMBER_EPOCH if epoch < now.epoch else ErrorCode.FENCED_MEMBER_EPOCH


def _is_too_large(keeper: Gatekeeper, group: Group, gates: GroupGates, request: ConsumerGroupPositionRequest) -> bool:
    """Whether a request names many more topics and partitions than the group subscribes to, or what is no topic's name.

    A question that waits keeps its names.
    """
    if any(len(topic.topic) > TOPIC_NAME_LENGTH_MAX for topic in request.topics):
        return True
    by_name = keeper.offsets.image.by_name
    room = sum(topic.size for name in keeper.topics_of(group, gates) if (topic := by_name.get(name)) is not None)
    return sum(1 + len(topic.partitions) for topic in request.topics) > 2 * room + SPARE_PARTITIONS


def _session_timeout_ms(group: Group, settings: GroupSettings, member_id: str) -> int:
    if isinstance(group, ClassicGroup):
        return group.members[member_id].session_timeout_ms
    said = group.members[member_id].described.classic
    return settings.of(group.group_id).session_timeout_ms if said is None else said.session_timeout_ms


def _taken(
    keeper: Gatekeeper,
    group: Group,
    gates: GroupGates,
    request: ConsumerGroupPositionRequest,
    ticket: Hashable,
    now_ms: int,
) -> Question:
    """Take the reports of a request; return its question: of partitions that exist in the group's subscription."""
    subscribed, owner = keeper.topics_of(group, gates), keeper.owner(group, gates)
    member_id = request.member_id
    told = gates.questions.replied.get(member_id, {})
    topics: list[tuple[str, TopicImage | None, tuple[int, ...]]] = []
    known: dict[At, Told] = {}
    listed: set[At] = set()
    for asked, topic in named(request, keeper.offsets.image):
        if topic is not None and topic.name not in subscribed:
            topic = None
        needed: dict[int, None] = {}
        for part in asked.partitions:
            if part.need_position:
                needed[part.partition] = None
            if topic is None or not topic.has(part.partition):
                continue
            at = topic.topic_id, part.partition
            is_own = owner(at)[0] == member_id
            if is_own and 0 <= part.flushed <= topic.log_end(at[1]):
                _let_go(gates, at, member_id, part.flushed)
            if part.need_position:
                knew = told.get(at)
                known[at] = knew if knew is not None and knew.position == part.position else Told(part.position)
            elif is_own:
                listed.add(at)
                if part.position >= 0:
                    _report(keeper, group, gates, topic, at, member_id, part.position)
        topics.append((asked.topic, topic, tuple(needed)))
    return Question(member_id, ticket, tuple(topics), known, frozenset(listed))


def _let_go(gates: GroupGates, at: At, member_id: str, flushed: int) -> None:
    """Take what a member tells that it holds no more of its own partition; it may hold some again."""
    before = gates.standing.let_go(at, member_id, flushed)
    if flushed != before:
        gates.touched[at] = None
    if flushed < before:
        gates.outdate([at[0]])


def _report(
    keeper: Gatekeeper, group: Group, gates: GroupGates, topic: TopicImage, at: At, member_id: str, position: int
) -> None:
    """Take the position that a member tells of its own partition, unless it cannot be right."""
    was = keeper.offsets.current(group.group_id, topic.name, at[1])
    if position > topic.log_end(at[1]) or (was is not None and position < was.offset):
        return
    report = Report(member_id, position, -1 if was is None else was.offset)
    if gates.standing.report(at, report):
        gates.touched[at] = None
        made = gates.evaluated.get(at[0])
        if made is not None and made.is_behind(at[1], position):
            gates.outdate([at[0]])


def _answer(
    keeper: Gatekeeper, group: Group, gates: GroupGates, question: Question, now_ms: int
) -> ConsumerGroupPositionResponse | None:
    """The answer to a question; None while there is nothing to tell."""
    member_id = question.member_id
    if member_id not in group.members:
        return refused(ErrorCode.UNKNOWN_MEMBER_ID)
    if isinstance(group, ClassicGroup):
        if group.state is ClassicState.PREPARING_REBALANCE:
            return refused(ErrorCode.REBALANCE_IN_PROGRESS)
    elif _has_work(keeper, group, member_id, now_ms):
        return refused(ErrorCode.REBALANCE_IN_PROGRESS)
    if any(_position(keeper, group, gates, at) != known for at, known in question.known.items()) or any(
        at not in question.listed and at not in question.known for at in gates.wanted_of.get(member_id, ())
    ):
        return _reply(keeper, group, gates, question)
    return None


def _has_work(keeper: Gatekeeper, group: ConsumerGroup, member_id: str, now_ms: int) -> bool:
    """Whether a heartbeat of the member would change its assignment, by gates that are decided."""
    member, gate = group.members[member_id], Gate(keeper, group, now_ms, room=0)
    return reconcile(group, member, None, gate, gate.takes, gate.free) is not member


def _position(keeper: Gatekeeper, group: Group, gates: GroupGates, at: At) -> Told:
    """The group's progress in a partition, -1 if it is unknown, and up to where the partition counts by time."""
    topic = keeper.offsets.image.by_id.get(at[0])
    if topic is None or not topic.has(at[1]):
        return Told()
    was = keeper.offsets.current(group.group_id, topic.name, at[1])
    owner, standing = keeper.owner(group, gates), gates.standing
    raw = standing.raw(topic, at[1], None if was is None else was.offset, owner)
    position = standing.passed(topic, at[1], raw, owner)
    if not keeper.is_stalled(group, gates, at, was, raw):
        return Told(position)
    stall, made = standing.stalls[at], gates.evaluated.get(at[0])
    gate = None if made is None else made.own_gate(at[1])
    return Told(position, stall.told if gate is None else min(stall.told, gate))


def _reply(keeper: Gatekeeper, group: Group, gates: GroupGates, question: Question) -> ConsumerGroupPositionResponse:
    """The positions of all partitions that the member needs."""
    positions = {at: _position(keeper, group, gates, at) for at in question.known}
    gates.questions.replied[question.member_id] = positions
    wanted = gates.wanted_of.get(question.member_id, ())
    wanted = [at for at in wanted if at not in question.listed and at not in question.known]
    return question.reply(positions, wanted, keeper.offsets.image)
