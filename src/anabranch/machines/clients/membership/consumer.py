"""A member by the consumer protocol (KIP-848): heartbeats carry everything.

    FENCED ──► JOINING ──► JOINED ──► LEAVING ──► OUT        FENCED: the coordinator does not know this member
      ▲           └─────────┬──► STALE ──► (polled again) FENCED      STALE: left, since the application stopped polling
      └─────────────────────┘    FAILED: refused for good

Epoch 0 joins. The first heartbeat, and the first after a failed one, describes the member in full; others carry the
changes. The coordinator returns the target assignment. Owned partitions beyond the target are revoked, and a heartbeat
acknowledges this at once; missing ones are assigned as soon as the name of their topic's id is known. A member that was
fenced joins again with the same id when the application has released all partitions.

With `allow_key_share` a target may have ranges of a partition's keys (cooperative.md, section 3). Ranges move as
partitions do: of a partition with another share in the target, ranges beyond it are revoked and missing ones assigned,
and what stays is not touched. A member that was given ranges without having allowed it refuses: it leaves, and fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.clients.key_ranges import WHOLE
from anabranch.machines.clients.membership.assignment_job import AssignmentJob
from anabranch.machines.clients.membership.assignors import (
    AssignorMetadata,
    MemberAssignment,
    PartitionAssignor,
    TopicIdPartition,
    offer,
)
from anabranch.machines.clients.membership.polled import PolledMember
from anabranch.machines.clients.membership.sharing import (
    Shares,
    added,
    beyond,
    id_of,
    on_wire,
    shares_in,
    with_pending,
    with_ranges,
    without_ranges,
)
from anabranch.machines.clients.membership.steps import (
    UNRELATED_TO_MEMBER,
    Assign,
    Event,
    Explain,
    Failed,
    Lost,
    MemberSettings,
    Owned,
    Revoke,
    Send,
    Step,
    Subscription,
    TopicFacts,
    WaitUntil,
    backoff_ms,
)
from anabranch.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from anabranch.protocol.messages.consumer_group_heartbeat import Assignor as OfferedAssignor

JOIN, LEAVE, LEAVE_FOR_A_WHILE = 0, -1, -2
"""Member epochs of heartbeats that join or leave."""
LEAVE_ATTEMPTS_MAX = 2
FENCING = frozenset({ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID})


class Phase(Enum):
    """The phase of a membership."""

    OUT = auto()
    FENCED = auto()
    JOINING = auto()
    JOINED = auto()
    LEAVING = auto()
    STALE = auto()
    FAILED = auto()


HEARTBEATING = frozenset({Phase.JOINING, Phase.JOINED})


@dataclass(frozen=True, slots=True)
class _Description:
    """The description of a member in a heartbeat."""

    subscription: Subscription
    owned: frozenset[Owned] | None
    """None if the next heartbeat must carry the owned partitions, even unchanged."""
    server_assignor: str | None
    offered: tuple[OfferedAssignor, ...]


class ConsumerMember(PolledMember[Phase]):
    """One member; the package describes its driver's duties. `member_id` is the same for the life of the consumer."""

    def __init__(
        self,
        settings: MemberSettings,
        member_id: str,
        *,
        server_assignor: str | None = None,
        local_assignors: Iterable[PartitionAssignor] = (),
    ) -> None:
        super().__init__(settings, member_id, Phase.OUT)
        self._server_assignor = server_assignor
        self._assignors = {assignor.name: assignor for assignor in local_assignors}
        self._subscription = Subscription()
        self._epoch = JOIN
        self._target: frozenset[TopicIdPartition] | None = None
        self._shares: Shares = {}
        """The ranges of those partitions of the target that are shared."""
        self._names: dict[UUID, str] = {}
        self._nameable: tuple[frozenset[TopicIdPartition], frozenset[Owned]] | None = None
        """A target, and its partitions whose topics' names are known; None after other names, or other shares."""
        self._excess: tuple[frozenset[TopicIdPartition], frozenset[Owned], frozenset[Owned]] | None = None
        """A target, owned partitions, and those of them that are not in the target."""
        self._taken: Event | None = None
        self._explain: Explain | None = None
        self._error: ApiError | None = None
        self._confirmed: _Description | None = None
        self._describing: _Description | None = None
        self._report = False
        """The next heartbeat must carry the owned partitions, since the target is new."""
        self._pattern_sent = False
        """The coordinator may have a pattern: the next heartbeat without a pattern must clear it."""
        self._unsure = False
        """A heartbeat with the owned partitions has no response yet: all others may be reassigned already."""
        self._urgent = False
        self._flight = 0
        self._tickets = 0
        self._due_ms = 0
        self._interval_ms = 0
        self._failures = 0
        self._leave_epoch = 0
        """The epoch of the heartbeat that leaves; 0 if none is to be sent."""
        self._leave_failures = 0
        self._known = False
        """Whether the coordinator may have a record of this member."""
        self._assignment = AssignmentJob(settings, self._assignors)

    # -- calls of the application -------------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> None:
        """Subscribe; join the group if the member has not joined yet."""
        assert subscription.topics or subscription.pattern is not None
        self._subscription = subscription
        if self._phase in (Phase.OUT, Phase.FAILED, Phase.LEAVING):
            self._error = None
            self._leave_epoch = 0
            self._drop_out(Phase.FENCED)
            self._due_ms = 0
        self._urgent = True
        self._advance()

    def leave(self, *, stay: bool | None = None) -> None:
        """Leave, once all partitions are revoked. With `stay`, the default of static members, keep the membership.

        A static member with `stay` must return within the session timeout; a dynamic one sends no leaving heartbeat.
        """
        staying = self._is_static if stay is None else stay
        was_in = self._phase in HEARTBEATING and self._known
        if self._phase is Phase.STALE and self._leave_epoch:
            was_in = True
        if was_in:
            self._leave_epoch = LEAVE if not staying else LEAVE_FOR_A_WHILE if self._is_static else 0
        if self._phase is not Phase.OUT:
            self._phase = Phase.LEAVING
        self._has_lost_slices = False
        self._advance()

    def heartbeat_now(self) -> None:
        """Send the next heartbeat at once: the coordinator has something to reconcile."""
        self._urgent = True

    # -- the member's state -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The member epoch."""
        return self._epoch

    @property
    def is_member(self) -> bool:
        """Whether the coordinator accepts this member's commits, as far as known."""
        return self._epoch > 0

    @property
    def has_left(self) -> bool:
        """Whether the departure is complete, or the member never joined."""
        return self._phase is Phase.OUT

    @property
    def wanted_ids(self) -> frozenset[UUID]:
        """Topic ids with unknown names; answer with `on_topics`."""
        if self._target is None or len(self._known_of(self._target)) == len(self._target):
            return frozenset()
        return frozenset(tp.topic_id for tp in self._target if tp.topic_id not in self._names)

    @property
    def wanted_topics(self) -> frozenset[str]:
        """Topics with partition counts to look up: none, the coordinator assigns."""
        return frozenset()

    @property
    def assignor_error(self) -> Exception | None:
        """The last error of the local assignor, or the coordinator's error for its result."""
        return self._assignment.error

    # -- reports of the driver ----------------------------------------------------------------------------------------

    def on_topics(self, topics: Iterable[TopicFacts]) -> None:
        """Handle the names of topics."""
        for topic in topics:
            self._names[topic.topic_id] = topic.name
        self._nameable = None

    def on_response(self, ticket: int, response: Any, now_ms: int) -> None:
        """Handle the response to a request, or the result of a computation."""
        if ticket == self._flight:
            self._flight = 0
            self._heartbeat_answered(response, now_ms)
        elif self._assignment.take(ticket, response, now_ms):
            self._urgent = True
        self._advance()

    def on_error(self, ticket: int, error: Exception, now_ms: int) -> None:
        """Handle a missing response: the coordinator may have carried out the request or not."""
        if ticket == self._flight:
            self._flight = 0
            if isinstance(error, ApiError) and not error.retriable:
                self._fail(error)
            else:
                self._heartbeat_failed(now_ms)
        else:
            self._assignment.failed(ticket, error, now_ms)
        self._advance()

    def done(self, event: Event, now_ms: int) -> None:
        """Report that the application has handled the event."""
        assert event is self._taken
        self._taken = None
        match event:
            case Revoke(partitions) | Lost(partitions):
                self._owned = without_ranges(self._owned, partitions)
                self._has_lost_slices = self._has_lost_slices and not isinstance(event, Lost)
                self._urgent = True
            case Assign(partitions):
                self._owned = with_ranges(self._owned, partitions)
                self._urgent = True
            case Explain():
                self._explain = None if self._explain is event else self._explain
            case Failed():
                pass
        self._advance()

    # -- steps and events ---------------------------------------------------------------------------------------------

    def event(self) -> Event | None:
        """The next event for the application; returned again until it is taken."""
        if self._taken is not None:
            return None
        if self._phase in (Phase.FENCED, Phase.STALE, Phase.FAILED):
            if self._owned or self._has_lost_slices:
                return Lost(self._owned)
            return Failed(self._error) if self._error is not None and self._phase is Phase.FAILED else None
        if self._phase is Phase.LEAVING:
            if not self._owned:
                return None
            return Revoke(self._owned) if self.is_member else Lost(self._owned)
        if self._phase is not Phase.JOINED or self._target is None:
            return None
        if excess := self._beyond(self._target):
            return Revoke(excess)
        if self._explain is not None:
            return self._explain
        if not self._unsure and (missing := self._known_of(self._target) - self._owned):
            return Assign(added(missing, self._owned))
        return None

    def take(self) -> Event | None:
        """Take the next event for the application; the following one comes after `done`."""
        event = self.event()
        if event is not None:
            self._taken = event
        return event

    def next(self, now_ms: int) -> Step:
        """Return the next step for the network: a request, a computation or a wait."""
        self._check_poll(now_ms)
        if self._phase is Phase.JOINED and (
            step := self._assignment.next(self._member_id, self._epoch, now_ms, self._ticket)
        ):
            return step
        if self._flight:
            return self._wait(None)
        if self._leave_epoch and (self._phase is Phase.STALE or (not self._owned and self._taken is None)):
            if now_ms < self._due_ms and self._leave_failures:
                return self._wait(self._due_ms)
            return self._send_leave()
        if self._phase not in HEARTBEATING:
            return self._wait(None)
        if now_ms < self._due_ms and not (self._urgent and not self._failures):
            return self._wait(self._due_ms)
        return self._send_heartbeat(now_ms)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ticket(self) -> int:
        """Return a new request number."""
        self._tickets += 1
        return self._tickets

    def _wait(self, at_ms: int | None) -> WaitUntil:
        times = [at_ms, self._assignment.next_ms if self._phase is Phase.JOINED else None]
        if self._phase in HEARTBEATING:
            times.append(self._poll_deadline_ms)
        known = [time for time in times if time is not None]
        return WaitUntil(min(known) if known else None)

    def _check_poll(self, now_ms: int) -> None:
        deadline = self._poll_deadline_ms
        if deadline is not None and now_ms >= deadline and self._phase in HEARTBEATING:
            known = self._known
            self._drop_out(Phase.STALE)
            self._leave_epoch = (LEAVE_FOR_A_WHILE if self._is_static else LEAVE) if known else 0

    def _drop_out(self, phase: Phase) -> None:
        """End the membership; the owned partitions are lost."""
        self._phase = phase
        if phase is not Phase.LEAVING:
            self._lose_slices()
        self._epoch = JOIN
        self._confirmed = self._describing = None
        self._target, self._shares = None, {}
        self._explain = None
        self._unsure = self._pattern_sent = False
        self._flight = 0
        self._failures = self._leave_failures = 0
        self._leave_epoch = 0
        self._assignment.drop()

    def _fail(self, error: ApiError) -> None:
        if self._phase in (Phase.LEAVING, Phase.STALE):
            self._leave_epoch = 0
            self._known = False
            self._epoch = JOIN
            return
        self._drop_out(Phase.FAILED)
        self._known = False
        self._error = error

    def _advance(self) -> None:
        """Continue once the events, or the request, of the current phase are done."""
        if self._owned or self._has_lost_slices or self._taken is not None or self._flight or self._leave_epoch:
            return
        if self._phase is Phase.LEAVING:
            self._phase, self._epoch = Phase.OUT, JOIN
        elif self._phase is Phase.FENCED or (self._phase is Phase.STALE and self._poll_deadline_ms is None):
            self._phase = Phase.JOINING
            self._urgent = True

    def _known_of(self, target: frozenset[TopicIdPartition]) -> frozenset[Owned]:
        """The partitions of the target whose topics' names are known; computed once per target and names."""
        if self._nameable is None or self._nameable[0] is not target:
            names = self._names
            known = [Owned(names[tp.topic_id], tp.partition, tp.topic_id) for tp in target if tp.topic_id in names]
            if self._shares:
                known = [owned._replace(keys=self._shares.get(id_of(owned), WHOLE)) for owned in known]
            self._nameable = target, frozenset(known)
        return self._nameable[1]

    def _beyond(self, target: frozenset[TopicIdPartition]) -> frozenset[Owned]:
        """The owned partitions that are not in the target; computed once per target and owned partitions."""
        last = self._excess
        if last is None or last[0] is not target or last[1] is not self._owned:
            last = self._excess = target, self._owned, beyond(self._owned, target, self._shares)
        return last[2]

    def _send_leave(self) -> Send:
        self._flight = self._ticket()
        return Send(
            self._flight,
            ConsumerGroupHeartbeatRequest(
                group_id=self._settings.group_id,
                member_id=self._member_id,
                member_epoch=self._leave_epoch,
                instance_id=self._settings.group_instance_id,
            ),
        )

    def _send_heartbeat(self, now_ms: int) -> Send:
        confirmed = None if self._epoch == JOIN else self._confirmed
        wanted = self._subscription
        offered = offer(tuple(self._assignors.values()))
        request = ConsumerGroupHeartbeatRequest(
            group_id=self._settings.group_id,
            member_id=self._member_id,
            member_epoch=self._epoch,
            instance_id=self._settings.group_instance_id,
        )
        if confirmed is None:
            request.rack_id = self._settings.client_rack
            request.rebalance_timeout_ms = self._settings.max_poll_interval_ms
        if confirmed is None or confirmed.subscription != wanted:
            request.subscribed_topic_names = sorted(wanted.topics)
            if wanted.pattern is not None:
                request.subscribed_topic_regex = wanted.pattern
                self._pattern_sent = True
            elif self._pattern_sent:
                request.subscribed_topic_regex = ""
        if confirmed is None or confirmed.server_assignor != self._server_assignor:
            request.server_assignor = self._server_assignor
        if offered and (confirmed is None or confirmed.offered != offered):
            request.client_assignors = list(offered)
        request.allow_key_share = self._settings.allow_key_share
        owned = with_ranges(self._owned, self._taken.partitions) if isinstance(self._taken, Assign) else self._owned
        if confirmed is None or confirmed.owned != owned or self._report:
            request.topic_partitions = on_wire(owned)
            self._unsure = True
        self._describing = _Description(wanted, owned, self._server_assignor, offered)
        self._flight = self._ticket()
        self._known = True
        self._report = self._urgent = False
        self._due_ms = now_ms + self._interval_ms
        return Send(self._flight, request)

    def _heartbeat_answered(self, response: ConsumerGroupHeartbeatResponse, now_ms: int) -> None:
        code = ErrorCode.of(response.error_code)
        if self._describing is None:
            self._leave_answered(code, now_ms)
        elif code is ErrorCode.NONE:
            self._heartbeat_taken(response, now_ms)
        elif code in FENCING:
            failures = self._failures + 1
            leaving = self._phase is Phase.LEAVING
            self._drop_out(Phase.LEAVING if leaving else Phase.FENCED)
            self._known = False
            self._failures = failures
            self._due_ms = now_ms + (backoff_ms(self._settings, failures) if failures > 1 else 0)
        elif code in UNRELATED_TO_MEMBER:
            self._heartbeat_failed(now_ms)
        else:
            self._describing = None
            self._fail(ApiError(code, _why(code, response.error_message, self._settings)))

    def _heartbeat_taken(self, response: ConsumerGroupHeartbeatResponse, now_ms: int) -> None:
        self._confirmed, self._describing = self._describing, None
        self._unsure = False
        self._pattern_sent = self._confirmed is not None and self._confirmed.subscription.pattern is not None
        self._failures = 0
        if response.member_id:
            self._member_id = response.member_id
        new_epoch = response.member_epoch != self._epoch
        self._epoch = response.member_epoch
        self._interval_ms = response.heartbeat_interval_ms
        if self._phase is Phase.JOINING:
            self._phase = Phase.JOINED
        self._due_ms = max(now_ms, self._due_ms if self._due_ms > now_ms else now_ms + self._interval_ms)
        if response.assignment is not None:
            self._targeted(response.assignment, new_epoch)
        self._assignment.heartbeat(wanted=response.should_compute_assignment)

    def _targeted(self, assignment: Assignment, new_epoch: bool) -> None:
        target = _ids_in(assignment.topic_partitions)
        try:
            shares = shares_in(assignment.topic_partitions)
            ranges = with_pending(target, shares, assignment.pending_topic_partitions) if self._assignors else {}
        except ValueError as error:
            self._refuse(ErrorCode.INVALID_ASSIGNMENT, f"was given what it cannot read: {error}")
            return
        if shares and not self._settings.allow_key_share:
            names = ", ".join(str(each.partition) for each in sorted(shares))
            why = f"was given ranges of the keys of partition {names}, and reads whole partitions only"
            self._refuse(
                ErrorCode.CONSUMER_RANGE_FETCH_NOT_ACCEPTED, f"{why}: set allow.key.share, or none in the group"
            )
            return
        if target != self._target or shares != self._shares:
            self._target, self._shares = target, shares
            self._nameable = self._excess = None
            reconciled = self.event() is None
            self._report = self._report or reconciled
            self._urgent = self._urgent or reconciled
        if new_epoch and self._assignors:
            metadata = AssignorMetadata(assignment.metadata_version, bytes(assignment.metadata_bytes))
            whole = target | _ids_in(assignment.pending_topic_partitions)
            self._explain = Explain(assignment.error, MemberAssignment(whole, metadata, ranges), self._epoch)

    def _refuse(self, code: ErrorCode, why: str) -> None:
        """Leave the group for good: its assignment is of no use to this member."""
        self._drop_out(Phase.FAILED)
        self._leave_epoch = LEAVE
        self._error = ApiError(code, f"this member of group '{self._settings.group_id}' {why}")

    def _heartbeat_failed(self, now_ms: int) -> None:
        """Describe the member in full again, a little later: the coordinator may have accepted the heartbeat or not."""
        if self._describing is None:
            self._leave_answered(ErrorCode.NETWORK_EXCEPTION, now_ms)
            return
        self._describing = self._confirmed = None
        self._failures += 1
        self._due_ms = now_ms + backoff_ms(self._settings, self._failures)

    def _leave_answered(self, code: ErrorCode, now_ms: int) -> None:
        self._leave_failures += 1
        if code in UNRELATED_TO_MEMBER and self._leave_failures < LEAVE_ATTEMPTS_MAX:
            self._due_ms = now_ms + backoff_ms(self._settings, self._leave_failures)
            return
        self._leave_epoch = 0
        self._epoch = JOIN
        self._known = False
        self._confirmed = None


def _ids_in(topics: Iterable[TopicPartitions]) -> frozenset[TopicIdPartition]:
    return frozenset(TopicIdPartition(topic.topic_id, number) for topic in topics for number in topic.partitions)


def _why(code: ErrorCode, message: str | None, settings: MemberSettings) -> str:
    reason = message or "the coordinator gave no reason"
    hints = {
        ErrorCode.UNRELEASED_INSTANCE_ID: f"another member uses the instance id '{settings.group_instance_id}': "
        "stop it, or wait until its session has ended",
        ErrorCode.GROUP_MAX_SIZE_REACHED: "the group is full; raise group.consumer.max.size, or run fewer members",
        ErrorCode.UNSUPPORTED_ASSIGNOR: "name an assignor that the coordinator has, or that all members offer",
        ErrorCode.INVALID_REGULAR_EXPRESSION: "the pattern must be an RE2 regular expression",
    }
    hint = hints.get(code)
    return f"group '{settings.group_id}' refuses this member: {reason}" + (f" ({hint})" if hint else "")
