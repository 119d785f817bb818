"""One shard of the group coordinator: all groups, of both protocols, whose names fall to one log partition.

Requests come in as messages, with their sender and the time; changes go out as records, and only `apply` changes
durable state. Volatile state (sessions, parked requests, a classic rebalance in progress, the member asked to compute
an assignment) may change at once: a reload does without it.

Timers are named by tuples: ("session" | "rebalance" | "join" | "sync", group, member), ("compute", group),
("classic", group, ...), ("gates", group), ("settle",), ("expire",), ("fold",), ("folded", producer id, number).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, TypeVar

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.groups import classic, migration, views
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup, ClassicSettings
from anabranch.machines.groups.consumer import balancing, client_side
from anabranch.machines.groups.consumer import heartbeat as beats
from anabranch.machines.groups.consumer.group import (
    LEFT_FOR_A_WHILE,
    LEFT_FOR_GOOD,
    ConsumerGroup,
    MemberState,
)
from anabranch.machines.groups.consumer.step import Live, Step
from anabranch.machines.groups.consumer.target import concerned, subscriptions
from anabranch.machines.groups.expiry import Expiry
from anabranch.machines.groups.gate import HEARTBEAT_ROOM, Gate
from anabranch.machines.groups.gatekeeper import LOOK_ROOM, Gatekeeper
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.offset_requests import OffsetRequests
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import Positions
from anabranch.machines.groups.positions_asked import AskedPositions, decide_look
from anabranch.machines.groups.ranged import RangedCommits
from anabranch.machines.groups.records import (
    CoordinatorRecord,
    GroupMetadataKey,
    GroupTopicStartKey,
    IndividualCommitKey,
    OffsetCommitKey,
    TransactionRangesKey,
)
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.groups.resets import HeardResets
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.groups.settling import Settling
from anabranch.machines.groups.starts import Starts
from anabranch.machines.groups.waiting import with_waiting
from anabranch.machines.groups.weights import Weights
from anabranch.machines.outcome import Draft, Outcome, Parked
from anabranch.protocol.messages.consumer_group_describe import DescribedGroup as DescribedConsumerGroup
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from anabranch.protocol.messages.consumer_group_install_assignment import (
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
)
from anabranch.protocol.messages.consumer_group_prepare_assignment import (
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)
from anabranch.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse
from anabranch.protocol.messages.list_groups import ListedGroup
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

PROTOCOL_NAME_MAY_BE_NULL = 7
Group = ConsumerGroup | ClassicGroup
Reply = TypeVar("Reply")


class Coordinator(AskedPositions, HeardResets, OffsetRequests, Weights):
    """A shard; see the module."""

    def __init__(self, settings: GroupSettings, image: Image | None = None, regexes: Regexes | None = None) -> None:
        """`regexes`: those that several shards share."""
        self.settings = settings
        self.groups: dict[str, Group] = {}
        self.offsets = Offsets(settings, image or Image())
        self.rebalances: Counter[str] = Counter()
        """How many epochs began, by protocol: `consumer`, `classic`."""
        self._classic = ClassicSettings(
            initial_rebalance_delay_ms=settings.initial_rebalance_delay_ms,
            session_timeout_min_ms=settings.min_session_timeout_ms,
            session_timeout_max_ms=settings.max_session_timeout_ms,
            size_max=settings.max_size,
        )
        self.regexes = regexes or Regexes(settings.consumer_regex_length_max)
        self._lives: defaultdict[str, Live] = defaultdict(Live)
        self.starts = Starts()
        self.keeper = Gatekeeper(self.groups, self.offsets, self.starts, self.regexes)
        self.offsets.on_commit = self.keeper.committed
        self.ranged = RangedCommits(self.groups, self.offsets, self.keeper)
        self.offsets.on_full = self.ranged.full
        self.settling = Settling(self.groups, self.offsets, self.starts, self.regexes)
        self.expiry = Expiry(
            self.groups,
            self.offsets,
            read_topics=self._read_topics,
            end=self._end,
            positions_gone=self.keeper.positions_gone,
            began=self.starts.groups,
        )
        self._arriving: dict[str, ClassicGroup] = {}
        """Classic groups that replace converted ones as soon as the records of the conversion are applied."""

    @property
    def image(self) -> Image:
        """The existing topics; set before `loaded`, and by `topics_changed` from then on."""
        return self.offsets.image

    @image.setter
    def image(self, image: Image) -> None:
        self.offsets.image = image

    @property
    def positions(self) -> Positions:
        """The committed offsets of the groups."""
        return self.offsets.positions

    # -- the fold ------------------------------------------------------------------------------------------------------

    def apply(self, record: CoordinatorRecord, *, producer_id: int = -1) -> None:
        """Fold a record; a position with a producer id is pending until that producer's marker."""
        key, value = record
        match key:
            case OffsetCommitKey():
                self.positions.apply(key, value, producer_id)
                if producer_id < 0:
                    self._follow(key.group, (key.topic, key.partition))
            case IndividualCommitKey():
                self.offsets.individual.apply(key, value)
            case TransactionRangesKey():
                self.offsets.in_transactions.apply(key, value, producer_id)
            case GroupMetadataKey():
                self._apply_classic(key.group, value)
            case GroupTopicStartKey():
                self.starts.apply(key, value)
            case _:
                self._apply_consumer(key.group_id, record)

    def _follow(self, group_id: str, partition: tuple[str, int]) -> None:
        """Bury the ranges that a position has passed."""
        individual = self.offsets.individual
        individual.applied += 1
        if individual:
            individual.follow(group_id, partition, self.positions.get(group_id, *partition))

    def _apply_classic(self, group_id: str, value: Any) -> None:
        group = self.groups.get(group_id)
        if value is None:
            if isinstance(group, ClassicGroup):
                del self.groups[group_id]
            return
        if not isinstance(group, ClassicGroup):
            group = ClassicGroup(group_id)
        self.groups[group_id] = classic.apply(group, value)

    def _apply_consumer(self, group_id: str, record: CoordinatorRecord) -> None:
        group = self.groups.get(group_id)
        if record.value is None and not isinstance(group, ConsumerGroup):
            return
        if not isinstance(group, ConsumerGroup):
            group = self.groups[group_id] = ConsumerGroup(group_id)
        group.apply(record)
        if record.value is None and type(record.key).__name__ == "ConsumerGroupMetadataKey":
            del self.groups[group_id]
            self._lives.pop(group_id, None)
            arriving = self._arriving.pop(group_id, None)
            if arriving is not None:
                self.groups[group_id] = arriving

    def loaded(self, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """After the last record: start sessions and take the steps that are due (KIP-848, Fail Over)."""
        draft: Draft[CoordinatorRecord] = Draft()
        for group in list(self.groups.values()):
            if isinstance(group, ClassicGroup):
                draft.add(classic.decide_loaded(group, self._classic, now_ms))
                continue
            step = self._step(group, now_ms)
            for member in group.members.values():
                step.keep_session(member)
                if member.state is MemberState.UNREVOKED_PARTITIONS:
                    step.expect_within_rebalance_timeout("rebalance", member)
            if not step.look_at_topics() and group.target_shares and not self.settings.shares_max(group.group_id):
                step.next_epoch()
            step.assign()
            balancing.expect_look(step)
            draft.add(step.draft)
        self.settling.loaded(draft, now_ms)
        self.ranged.loaded(draft, now_ms)
        self.expiry.begin_later(draft, now_ms)
        return draft.outcome(None)

    def topics_changed(self, image: Image, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """Begin an epoch in groups whose topics changed, and delete positions of deleted topics."""
        before, self.image = self.image, image
        draft: Draft[CoordinatorRecord] = Draft()
        draft.write(*self.offsets.of_topics_gone(before))
        self.settling.topics_changed(before, draft, now_ms)
        differing = image.differences(before)
        for group in list(self.groups.values()):
            if isinstance(group, ConsumerGroup) and concerned(group, differing, self.regexes):
                step = self._step(group, now_ms)
                if step.look_at_topics():
                    step.assign()
                    self.settling.look(group)
                    draft.add(step.draft)
                    self.keeper.of(group.group_id).is_due = True
            self.keeper.topics_changed(group.group_id)
            self.keeper.ring(draft, group.group_id, now_ms)
        self._look_at_purgatory(draft, now_ms)
        return self.ranged.burying(draft.outcome(None))

    def on_timer(self, key: Any, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """The time that was set for `key` has come."""
        match key:
            case ("classic", str(group_id), *_):
                group = self.groups.get(group_id)
                if not isinstance(group, ClassicGroup):
                    return Outcome(None)
                return self._moved(group, classic.decide_timer(group, key, now_ms), now_ms)
            case ("compute", str(group_id)):
                group = self.groups.get(group_id)
                if not isinstance(group, ConsumerGroup):
                    return Outcome(None)
                step = self._step(group, now_ms)
                client_side.overdue(step)
                return step.draft.outcome(None)
            case ("balance", str(group_id)):
                return self._balance(group_id, now_ms)
            case ("gates", str(group_id)):
                return decide_look(self.keeper, group_id, now_ms)
            case ("settle",):
                draft = Draft[CoordinatorRecord]()
                draft.add(self.settling.decide_more(now_ms))
                self._look_at_purgatory(draft, now_ms)
                return draft.outcome(None)
            case ("expire",):
                draft = Draft[CoordinatorRecord]()
                draft.add(self.expiry.decide(now_ms))
                self._look_at_purgatory(draft, now_ms)
                return self.ranged.burying(draft.outcome(None))
            case ("fold",):
                return self.decide_fold(now_ms)
            case ("folded", int(producer_id), int(number)):
                return self.decide_fold(now_ms, (producer_id, number))
            case ("purgatory", str(group_id)):
                return self.decide_purgatory(group_id, now_ms)
            case ("ranges",):
                return self.ranged.burying(self.ranged.decide_checks(now_ms))
            case (str(kind), str(group_id), str(member_id)):
                return self._expelled(kind, group_id, member_id, now_ms)
        raise AssertionError(key)

    def _balance(self, group_id: str, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        group = self.groups.get(group_id)
        if not isinstance(group, ConsumerGroup) or not group.members:
            return Outcome(None)
        step = self._step(group, now_ms)
        balancing.look(step)
        return self._done(step).outcome(None)

    def _expelled(self, kind: str, group_id: str, member_id: str, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """End the session of a member that timed out, or missed its rebalance timeout."""
        group = self.groups.get(group_id)
        member = group.members.get(member_id) if isinstance(group, ConsumerGroup) else None
        if member is None or (kind == "rebalance" and member.state is not MemberState.UNREVOKED_PARTITIONS):
            return Outcome(None)
        assert isinstance(group, ConsumerGroup)
        draft: Draft[CoordinatorRecord] = Draft()
        self._remove(self._step(group, now_ms), frozenset([member_id]), draft)
        return draft.outcome(None)

    # -- the consumer protocol -----------------------------------------------------------------------------------------

    def consumer_group_heartbeat(
        self, request: ConsumerGroupHeartbeatRequest, caller: Caller, now_ms: int
    ) -> Outcome[ConsumerGroupHeartbeatResponse, CoordinatorRecord]:
        """Join, stay, leave."""
        try:
            beats.check_request(request, caller.version, self.settings.consumer_assignors)
            if request.member_epoch in (LEFT_FOR_GOOD, LEFT_FOR_A_WHILE):
                return self._leave(request, caller, now_ms)
            group = self.groups.get(request.group_id)
            joining = request.member_epoch == beats.JOINING
            if not joining and not isinstance(group, ConsumerGroup):
                raise beats.unknown(request.group_id, request.member_id)
            if isinstance(group, ClassicGroup):
                return self._upgrade(group, request, caller, now_ms)
            room = LOOK_ROOM if joining else HEARTBEAT_ROOM
            step = self._step(group or ConsumerGroup(request.group_id), now_ms, room=room)
            response = beats.heartbeat(step, request, caller)
        except ApiError as error:
            return Outcome(ConsumerGroupHeartbeatResponse(error_code=error.code, error_message=error.message))
        return self._done(step).outcome(response)

    def _upgrade(
        self, group: ClassicGroup, request: ConsumerGroupHeartbeatRequest, caller: Caller, now_ms: int
    ) -> Outcome[ConsumerGroupHeartbeatResponse, CoordinatorRecord]:
        begun = migration.upgrade(group, self.settings, self.image)
        live = Live()
        self.keeper.converted(group.group_id)
        step = self._step(ConsumerGroup(group.group_id), now_ms, begun=begun, live=live)
        response = beats.heartbeat(step, request, caller)
        for member in step.group.classic_members:
            step.keep_session(member)
            if member.state is MemberState.UNREVOKED_PARTITIONS:
                step.expect_within_rebalance_timeout("rebalance", member)
        live.connections |= group.connections
        self._lives[group.group_id] = live
        draft: Draft[CoordinatorRecord] = Draft()
        draft.add(classic.decide_dissolve(group, now_ms))
        if not group.is_stored:
            del self.groups[group.group_id]
        draft.add(step.draft)
        self.settling.subscribed(step.group, draft, now_ms)
        self.rebalances["consumer"] += 1
        return draft.outcome(response)

    def _leave(
        self, request: ConsumerGroupHeartbeatRequest, caller: Caller, now_ms: int
    ) -> Outcome[ConsumerGroupHeartbeatResponse, CoordinatorRecord]:
        group = self.groups.get(request.group_id)
        if not isinstance(group, ConsumerGroup):
            raise beats.unknown(request.group_id, request.member_id)
        step = self._step(group, now_ms)
        member = beats.leaver(step, request, caller)
        response = ConsumerGroupHeartbeatResponse(member_id=member.member_id, member_epoch=request.member_epoch)
        draft: Draft[CoordinatorRecord] = Draft()
        if request.member_epoch == LEFT_FOR_A_WHILE:
            beats.leave_for_a_while(step, member)
            draft.add(step.draft)
            self._look_at_purgatory(draft, now_ms, [group.group_id])
        else:
            self._remove(step, frozenset([member.member_id]), draft)
        return draft.outcome(response)

    def prepare_assignment(
        self, request: ConsumerGroupPrepareAssignmentRequest, caller: Caller, now_ms: int
    ) -> Outcome[ConsumerGroupPrepareAssignmentResponse, CoordinatorRecord]:
        """Answer the input of a member's assignor."""
        del caller
        try:
            client_side.check_request(request)
            step = self._step(self._consumer_group(request.group_id), now_ms)
            response = client_side.prepare(step, request)
        except ApiError as error:
            return Outcome(ConsumerGroupPrepareAssignmentResponse(error_code=error.code, error_message=error.message))
        return self._done(step).outcome(response)

    def install_assignment(
        self, request: ConsumerGroupInstallAssignmentRequest, caller: Caller, now_ms: int
    ) -> Outcome[ConsumerGroupInstallAssignmentResponse, CoordinatorRecord]:
        """Take the target that a member's assignor computed."""
        del caller
        try:
            client_side.check_request(request)
            step = self._step(self._consumer_group(request.group_id), now_ms)
            response = client_side.install(step, request)
        except ApiError as error:
            return Outcome(ConsumerGroupInstallAssignmentResponse(error_code=error.code, error_message=error.message))
        return self._done(step).outcome(response)

    def _consumer_group(self, group_id: str) -> ConsumerGroup:
        group = self.groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"There is no group {group_id} of the consumer protocol.")
        return group

    def _step(
        self,
        group: ConsumerGroup,
        now_ms: int,
        *,
        begun: tuple[ConsumerGroup, Draft[CoordinatorRecord]] | None = None,
        live: Live | None = None,
        room: int = LOOK_ROOM,
    ) -> Step:
        live = live or (self._lives[group.group_id] if group.group_id in self.groups else Live())
        return Step(
            group,
            live,
            image=self.image,
            regexes=self.regexes,
            settings=self.settings,
            gate=Gate(self.keeper, group, now_ms, room),
            now_ms=now_ms,
            begun=begun,
        )

    def _done(self, step: Step) -> Draft[CoordinatorRecord]:
        if step.group.epoch != step.epoch_before:
            balancing.expect_look(step)
            self.rebalances["consumer"] += 1
            self.settling.subscribed(step.group, step.draft, step.now_ms)
        if step.draft.records:  # A heartbeat that is refused founds no group.
            self._lives.setdefault(step.group_id, step.live)
            self._look_at_purgatory(step.draft, step.now_ms, [step.group_id])
        self.keeper.ring(step.draft, step.group_id, step.now_ms)
        return step.draft

    def _remove(
        self, step: Step, member_ids: frozenset[str], draft: Draft[CoordinatorRecord], *, forget: bool = True
    ) -> None:
        """Take members out; if only classic members are left, the group is a classic one from now on."""
        group, settings = step.group, self.settings
        self._look_at_purgatory(draft, step.now_ms, [group.group_id])
        self.rebalances["consumer"] += 1
        if not migration.can_downgrade(group, member_ids, settings) or not any(
            group.members[member_id].described.classic is None for member_id in member_ids
        ):
            step.remove(*sorted(member_ids), forget=forget)
            draft.add(step.draft)
            self.settling.subscribed(step.group, draft, step.now_ms)
            return
        records, arriving = migration.downgrade(group, member_ids, self.image, step.now_ms)
        draft.write(*records)
        draft.write(classic.generation_record(arriving, step.now_ms, led=False))
        for member_id in group.members:
            for kind in ("session", "rebalance", "join", "sync"):
                draft.cancel_timer((kind, group.group_id, member_id))
        draft.cancel_timer(("compute", group.group_id))
        draft.add(classic.decide_loaded(arriving, self._classic, step.now_ms))
        draft.add(classic.decide_kick(arriving, step.now_ms))
        arriving.connections |= {
            member_id: connection
            for member_id, connection in step.live.connections.items()
            if member_id in arriving.members
        }
        self._arriving[group.group_id] = arriving
        self.settling.subscribed(arriving, draft, step.now_ms)

    # -- the classic protocol ------------------------------------------------------------------------------------------

    def join_group(
        self, request: JoinGroupRequest, caller: Caller, ticket: Hashable, now_ms: int
    ) -> Outcome[JoinGroupResponse | Parked, CoordinatorRecord]:
        """Join a classic group; or, as a classic member, one of the consumer protocol."""
        draft: Draft[CoordinatorRecord] = Draft()
        try:
            if not request.group_id:
                raise ApiError(ErrorCode.INVALID_GROUP_ID, "The group id is empty.")
            group = self.groups.get(request.group_id)
            if isinstance(group, ConsumerGroup) and group.members:
                step = self._step(group, now_ms)
                response = migration.join(step, request, caller)
                return self._done(step).outcome(response)
            if isinstance(group, ConsumerGroup):
                arriving = ClassicGroup(request.group_id, generation=group.epoch)
                outcome = classic.decide_join(arriving, request, caller, ticket, self._classic, self.image, now_ms)
                if arriving.is_vacant:
                    return outcome
                self._arriving[request.group_id] = arriving
                draft.write(*migration.end_records(group))
                draft.add(outcome)
                return draft.outcome(outcome.reply)
        except ApiError as error:
            name = None if caller.version >= PROTOCOL_NAME_MAY_BE_NULL else ""
            return Outcome(JoinGroupResponse(error_code=error.code, member_id=request.member_id, protocol_name=name))
        if group is None:
            group = self.groups[request.group_id] = ClassicGroup(request.group_id)
        generation = group.generation
        outcome = classic.decide_join(group, request, caller, ticket, self._classic, self.image, now_ms)
        self.rebalances["classic"] += group.generation != generation
        return self._moved(group, outcome, now_ms)

    def sync_group(
        self, request: SyncGroupRequest, caller: Caller, ticket: Hashable, now_ms: int
    ) -> Outcome[SyncGroupResponse | Parked, CoordinatorRecord]:
        """Hand in a generation's assignment, or ask for it."""
        group = self.groups.get(request.group_id)
        if isinstance(group, ClassicGroup):
            return self._moved(group, classic.decide_sync(group, request, caller, ticket, now_ms), now_ms)
        try:
            step = self._step(self._known(group, request.group_id, request.member_id), now_ms)
            response = migration.sync(step, request, caller)
        except ApiError as error:
            return Outcome(SyncGroupResponse(error_code=error.code))
        return self._done(step).outcome(response)

    def heartbeat(
        self, request: HeartbeatRequest, caller: Caller, now_ms: int
    ) -> Outcome[HeartbeatResponse, CoordinatorRecord]:
        """Keep a classic member's session."""
        del caller
        group = self.groups.get(request.group_id)
        if isinstance(group, ClassicGroup):
            self.keeper.spoke(group, request.member_id, now_ms)
            return classic.decide_heartbeat(group, request, now_ms)
        try:
            known = self._known(group, request.group_id, request.member_id)
            step = self._step(known, now_ms, room=HEARTBEAT_ROOM)
            response = migration.heartbeat(step, request)
        except ApiError as error:
            return Outcome(HeartbeatResponse(error_code=error.code))
        return self._done(step).outcome(response)

    def leave_group(
        self, request: LeaveGroupRequest, caller: Caller, now_ms: int
    ) -> Outcome[LeaveGroupResponse, CoordinatorRecord]:
        """Let members go."""
        group = self.groups.get(request.group_id)
        if isinstance(group, ClassicGroup):
            return self._moved(group, classic.decide_leave(group, request, caller.version, now_ms), now_ms)
        if group is None:
            return Outcome(migration.none_left(request, caller.version))
        response, gone = migration.leaving(group, request, caller.version)
        draft: Draft[CoordinatorRecord] = Draft()
        if gone:
            self._remove(self._step(group, now_ms), gone, draft, forget=False)
        return draft.outcome(response)

    def _moved(
        self, group: ClassicGroup, outcome: Outcome[Reply, CoordinatorRecord], now_ms: int
    ) -> Outcome[Reply, CoordinatorRecord]:
        """Add to a decision about a classic group what follows for its positions."""
        self._drop_vacant(group)
        draft: Draft[CoordinatorRecord] = Draft()
        draft.write(*outcome.records)
        self._look_at_purgatory(draft, now_ms, [group.group_id])
        if outcome.records:
            self.settling.subscribed(group, draft, now_ms)
        if not getattr(outcome.reply, "error_code", 0):
            self.keeper.ring(draft, group.group_id, now_ms, members_moved=True)
        return outcome.followed_by(draft)

    def _known(self, group: Group | None, group_id: str, member_id: str) -> ConsumerGroup:
        if not isinstance(group, ConsumerGroup):
            raise beats.unknown(group_id, member_id)
        return group

    def _drop_vacant(self, group: ClassicGroup) -> None:
        if group.is_vacant and self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]

    def _read_topics(self, group: Group | None) -> frozenset[str] | None:
        """The topics that members of a group subscribe to; None if they are unknown."""
        if group is None or not group.members:
            return frozenset()
        if isinstance(group, ConsumerGroup):
            return subscriptions(group, self.image, self.regexes)
        return classic.subscribed_topics(group)

    def _end(self, group: Group | None, group_id: str, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        """An empty group is no more."""
        self.settling.drop(group_id)
        draft.write(*self.starts.all_of(group_id))
        if isinstance(group, ConsumerGroup):
            draft.write(*migration.end_records(group))
        elif group is not None and group.state is classic.ClassicState.EMPTY:
            draft.add(classic.decide_delete(group, now_ms))

    # -- looking, deleting ---------------------------------------------------------------------------------------------

    def delete_group(self, group_id: str, now_ms: int) -> Outcome[ErrorCode, CoordinatorRecord]:
        """Remove an empty group with all it has committed."""
        group = self.groups.get(group_id)
        if not group_id:
            return Outcome(ErrorCode.INVALID_GROUP_ID)
        if group is None and group_id not in self.positions:
            return Outcome(ErrorCode.GROUP_ID_NOT_FOUND)
        if (group is not None and group.members) or self.offsets.has_pending(group_id):
            return Outcome(ErrorCode.NON_EMPTY_GROUP)
        if isinstance(group, ClassicGroup) and group.state is not classic.ClassicState.EMPTY:
            return Outcome(ErrorCode.NON_EMPTY_GROUP)
        draft: Draft[CoordinatorRecord] = Draft()
        draft.write(*self.offsets.all_of(group_id))
        self._end(group, group_id, draft, now_ms)
        return self._looking_at_purgatory(self.ranged.burying(draft.outcome(ErrorCode.NONE)), group_id, now_ms)

    def list_groups(self) -> Iterator[ListedGroup]:
        """All groups, those that only have positions included."""
        return views.list_groups(self.groups, self.positions)

    def view_group(self, group_id: str, now_ms: int = 0) -> classic.ClassicGroupView:
        """A classic group and its members, and what waits."""
        view = views.view_group(self.groups.get(group_id), group_id, self.positions)
        return with_waiting(view, self.keeper, now_ms)

    def view_consumer_group(self, group_id: str, now_ms: int = 0) -> views.ConsumerGroupView:
        """A group of the consumer protocol and its members: current and target assignments, and what waits."""
        view = views.view_consumer_group(self.groups.get(group_id), group_id, self.image, self.settings)
        return with_waiting(view, self.keeper, now_ms)

    def describe_consumer_group(self, group_id: str, now_ms: int = 0) -> DescribedConsumerGroup:
        """As `view_consumer_group`, with the members described."""
        return self.view_consumer_group(group_id, now_ms).described()

    def states(self) -> Iterator[tuple[tuple[str, str], int]]:
        """The protocol and state of each group, and how many members were looked at for that."""
        return views.states(self.groups)
