"""A member by the classic protocol: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

    UNJOINED ──► JOINING ──► (LEADING) ──► SYNCING ──► STABLE ──► LEAVING ──► OUT
        ▲            └───────────┴────────────┴──────────┤             FAILED: refused for good
        └──────── rebalance, lost, subscription ─────────┘             STALE: left, since no poll came

Eager members revoke everything before they join. Cooperative members keep their partitions, revoke those that the new
generation assigns to others, and then join again. The leader waits for partition counts (`wanted_topics`), assigns, and
joins again when the counts have changed. A member unknown to the coordinator, or whose generation is over, has lost its
partitions, whether a heartbeat tells or a commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any
from uuid import UUID

from anabranch.base.errors import ApiError, DecodeError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.membership.polled import PolledMember
from anabranch.machines.clients.membership.steps import (
    UNRELATED_TO_MEMBER,
    Assign,
    Event,
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
from anabranch.machines.clients.membership.strategies import (
    NO_GENERATION,
    NONE,
    STICKY,
    STRATEGIES,
    PartitionCounts,
    Subscriber,
    assign,
    assignment_bytes,
    assignment_of,
    is_cooperative,
    subscriber_of,
    subscription_bytes,
)
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse

PROTOCOL_TYPE = "consumer"
JOIN_SLACK_MS = 5_000
"""The allowance for the network: the JoinGroup response comes within the rebalance timeout plus this."""
LOOK_UNFETCHED_MS = 5_000
"""Between two looks of a leader at topics of which it owns no partition: no refused fetch tells it of a resize."""
LOSING = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION})


class Phase(Enum):
    """The phase of a membership."""

    OUT = auto()
    UNJOINED = auto()
    JOINING = auto()
    LEADING = auto()
    SYNCING = auto()
    STABLE = auto()
    LEAVING = auto()
    STALE = auto()
    FAILED = auto()


ALIVE = frozenset({Phase.UNJOINED, Phase.JOINING, Phase.LEADING, Phase.SYNCING, Phase.STABLE})


class ClassicMember(PolledMember[Phase]):
    """One member; the package describes its driver's duties."""

    def __init__(
        self,
        settings: MemberSettings,
        *,
        strategies: Sequence[str],
        session_timeout_ms: int,
        heartbeat_interval_ms: int,
        metadata_max_age_ms: int,
    ) -> None:
        assert strategies and all(strategy in STRATEGIES for strategy in strategies)
        super().__init__(settings, "", Phase.OUT)
        self._strategies = tuple(strategies)
        self._cooperative = is_cooperative(strategies)
        self._session_timeout_ms = session_timeout_ms
        self._interval_ms = heartbeat_interval_ms
        self._metadata_max_age_ms = metadata_max_age_ms
        self._subscription = Subscription()
        self._generation = NO_GENERATION
        self._lost = False
        """The owned partitions are lost, and the application has not handled the Lost event yet."""
        self._target: frozenset[Owned] | None = None
        self._remembered: tuple[int, frozenset[TopicPartition]] = (NO_GENERATION, frozenset())
        """The last assignment and its generation: the user data of sticky members."""
        self._rejoin = False
        """Join again as soon as the application has handled all events of this generation."""
        self._taken: Event | None = None
        self._error: ApiError | None = None
        self._flight = 0
        self._asked: Any = None
        """The request in flight, if any."""
        self._tickets = 0
        self._due_ms = 0
        self._failures = 0
        self._strategy = ""
        self._subscribers: list[Subscriber] = []
        self._counts: dict[str, PartitionCounts] = {}
        self._used: dict[str, PartitionCounts] = {}
        """The partition counts used in the leader's last assignment."""
        self._leads = False
        self._watched: frozenset[str] = frozenset()
        """The topics to which members of the group subscribe, as known to the leader."""
        self._unknown: frozenset[str] = frozenset()
        self._look_at_ms: int | None = None
        self._leave_sent = False

    # -- calls of the application -------------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> None:
        """Subscribe to topics; join, or join again."""
        assert subscription.pattern is None and subscription.topics, "patterns are resolved by the driver of a member"
        changed = subscription != self._subscription
        self._subscription = subscription
        if self._phase in (Phase.OUT, Phase.FAILED, Phase.LEAVING):
            self._error = None
            self._lose()
            self._phase, self._due_ms, self._flight = Phase.UNJOINED, 0, 0
            self._rejoin = False
        elif changed and self._phase is not Phase.STALE:
            if self._phase is Phase.STABLE:
                self._phase = Phase.UNJOINED
                if not self._failures:
                    self._due_ms = 0
            else:
                self._rejoin = True

    def heartbeat_now(self) -> None:
        """Send the next heartbeat at once: the coordinator has something to reconcile."""
        if self._phase is Phase.STABLE and not self._failures:
            self._due_ms = 0

    def leave(self, *, stay: bool | None = None) -> None:
        """Leave, once all partitions are revoked; by default a static member sends no LeaveGroup."""
        staying = self._is_static if stay is None else stay
        self._leave_sent = staying or not self._member_id
        if self._phase is not Phase.OUT:
            if self._phase in (Phase.STALE, Phase.FAILED):
                self._leave_sent = True
                self._lost = True
            self._phase = Phase.LEAVING
        self._has_lost_slices = False
        self._flight = 0
        self._advance()

    # -- the member's state -------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The generation."""
        return self._generation

    @property
    def is_member(self) -> bool:
        """Whether the coordinator accepts this member's commits, as far as known."""
        return self._generation >= 0

    @property
    def has_left(self) -> bool:
        """Whether the departure is complete, or the member never joined."""
        return self._phase is Phase.OUT

    @property
    def wanted_ids(self) -> frozenset[UUID]:
        """None: the classic protocol identifies topics by name."""
        return frozenset()

    @property
    def wanted_topics(self) -> frozenset[str]:
        """Topics with partition counts the leader needs; answer with `on_topics`, 0 for a missing topic."""
        return self._unknown

    # -- reports of the driver ----------------------------------------------------------------------------------------

    def on_topics(self, topics: Iterable[TopicFacts]) -> None:
        """Handle the partition counts of topics."""
        for topic in topics:
            self._counts[topic.name] = PartitionCounts(topic.partition_count, topic.retiring_count)
            self._unknown -= {topic.name}
        if self._unknown or not self._leads:
            return
        if self._phase is Phase.LEADING:
            self._phase, self._due_ms = Phase.SYNCING, 0
        elif not self._used:  # This leader took over a generation assigned earlier.
            self._used = {name: self._counts.get(name, NONE) for name in self._watched}
            self._check_taken_over()
            self._advance()
        elif self._phase is Phase.STABLE and any(
            self._counts.get(name, NONE) != used for name, used in self._used.items()
        ):
            self._phase, self._due_ms = Phase.UNJOINED, 0

    def layout_changed(self) -> None:
        """Report that fetches have shown another layout of a topic: the leader looks at its topics at once."""
        if self._leads:
            self._look_at_ms = 0

    def on_response(self, ticket: int, response: Any, now_ms: int) -> None:
        """Handle the response to a request."""
        if ticket != self._flight:
            return
        self._flight = 0
        code = ErrorCode.of(response.error_code)
        match self._asked:
            case JoinGroupRequest():
                self._joined(code, response, now_ms)
            case SyncGroupRequest():
                self._synced(code, response, now_ms)
            case HeartbeatRequest():
                self._beaten(code, now_ms)
            case _:
                self._left()
        self._advance()

    def on_error(self, ticket: int, error: Exception, now_ms: int) -> None:
        """Handle a missing response: the coordinator may have carried out the request or not."""
        if ticket != self._flight:
            return
        self._flight = 0
        if self._phase in (Phase.LEAVING, Phase.STALE):
            self._left()
        elif isinstance(error, ApiError) and not error.retriable:
            self._fail(error)
        else:
            if self._phase is Phase.SYNCING:
                self._phase = Phase.UNJOINED
            self._again(now_ms)
        self._advance()

    def commit_refused(self, code: ErrorCode, epoch: int, now_ms: int) -> None:
        """Handle a refused commit. While a join is under way, its answer tells what became of the generation."""
        if epoch == self._generation and code in LOSING and self._phase in (Phase.UNJOINED, Phase.STABLE):
            self._flight = 0
            if code is ErrorCode.ILLEGAL_GENERATION:
                self._leave_generation(self._member_id)
            else:
                self._start_over(now_ms)
            self._advance()

    def done(self, event: Event, now_ms: int) -> None:
        """Report that the application has handled the event."""
        assert event is self._taken
        self._taken = None
        match event:
            case Revoke(partitions):
                self._owned -= partitions
                self._rejoin = self._rejoin or (self._cooperative and self._phase is Phase.STABLE)
                if self._phase is Phase.UNJOINED and not self._failures:
                    self._due_ms = 0
            case Lost(partitions):
                self._owned -= partitions
                self._has_lost_slices = False
            case Assign(partitions):
                self._owned |= partitions
            case _:
                pass
        if not self._owned:
            self._lost = False
        self._advance()

    # -- steps and events ---------------------------------------------------------------------------------------------

    def event(self) -> Event | None:
        """The next event for the application; returned again until it is taken."""
        if self._taken is not None:
            return None
        if self._has_lost_slices or (self._owned and (self._lost or self._phase in (Phase.STALE, Phase.FAILED))):
            return Lost(self._owned)
        if self._phase is Phase.FAILED:
            return Failed(self._error) if self._error is not None else None
        if self._phase is Phase.LEAVING or (self._phase is Phase.UNJOINED and not self._cooperative):
            return Revoke(self._owned) if self._owned else None
        if self._phase is not Phase.STABLE or self._target is None:
            return None
        if excess := self._owned - self._target:
            return Revoke(excess)
        if added := self._target - self._owned:
            return Assign(added)
        return None

    def take(self) -> Event | None:
        """Take the next event for the application; the following one comes after `done`."""
        event = self.event()
        if event is not None:
            self._taken = event
        return event

    def next(self, now_ms: int) -> Step:
        """Return the next step for the network: a request or a wait."""
        self._check_poll(now_ms)
        self._refresh_counts(now_ms)
        if self._flight:
            return self._wait(None)
        match self._phase:
            case Phase.LEAVING | Phase.STALE:
                if not self._leave_sent and (self._phase is Phase.STALE or not (self._owned or self._taken)):
                    return self._send_leave()
                return self._wait(None)
            case Phase.UNJOINED:
                if self._may_join():
                    return self._send_join() if now_ms >= self._due_ms else self._wait(self._due_ms)
                return self._beat(now_ms)
            case Phase.SYNCING:
                return self._send_sync(now_ms) if now_ms >= self._due_ms else self._wait(self._due_ms)
            case Phase.LEADING | Phase.STABLE:
                return self._beat(now_ms)
            case _:
                return self._wait(None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _wait(self, at_ms: int | None) -> WaitUntil:
        times = [at_ms, self._look_at_ms if self._phase is Phase.STABLE and self._leads else None]
        if self._phase in ALIVE:
            times.append(self._poll_deadline_ms)
        known = [time for time in times if time is not None]
        return WaitUntil(min(known) if known else None)

    def _check_poll(self, now_ms: int) -> None:
        deadline = self._poll_deadline_ms
        if deadline is not None and now_ms >= deadline and self._phase in ALIVE:
            self._leave_sent = self._is_static or not self._member_id
            self._phase, self._flight = Phase.STALE, 0
            self._lose()
            if self._leave_sent:
                self._left()

    def _may_join(self) -> bool:
        if self._taken is not None or self._lost or self._has_lost_slices:
            return False
        return self._cooperative or not self._owned

    def _advance(self) -> None:
        """Continue once the events, or the request, of the current phase are done."""
        if self._phase is Phase.STABLE and self._rejoin and self.event() is None and self._taken is None:
            self._rejoin = False
            if not self._flight:
                self._phase, self._due_ms = Phase.UNJOINED, 0
            else:
                self._rejoin = True
        if self._owned or self._has_lost_slices or self._taken is not None or self._flight:
            return
        if self._phase is Phase.LEAVING and self._leave_sent:
            self._phase, self._generation = Phase.OUT, NO_GENERATION
        elif self._phase is Phase.STALE and self._leave_sent and self._poll_deadline_ms is None:
            self._phase, self._due_ms = Phase.UNJOINED, 0

    def _again(self, now_ms: int) -> None:
        self._failures += 1
        self._due_ms = now_ms + backoff_ms(self._settings, self._failures)
        if self._phase is Phase.JOINING:
            self._phase = Phase.UNJOINED

    def _lose(self) -> None:
        """Before a generation is left, mark the owned partitions as lost, with those of an Assign in progress."""
        self._lose_slices()
        self._lost = bool(self._owned) or isinstance(self._taken, Assign)

    def _start_over(self, now_ms: int) -> None:
        """Start over: to the coordinator, the member id or the generation is unknown."""
        self._leave_generation("")
        self._again(now_ms)

    def _leave_generation(self, member_id: str) -> None:
        """Give up a generation that went on without this member, with all partitions, and join again as `member_id`."""
        self._lose()
        self._member_id, self._generation = member_id, NO_GENERATION
        self._target = None
        self._phase, self._due_ms, self._rejoin = Phase.UNJOINED, 0, False

    def _fail(self, error: ApiError) -> None:
        self._lose()
        self._phase, self._error = Phase.FAILED, error
        self._member_id, self._generation = "", NO_GENERATION
        self._target, self._rejoin = None, False

    def _left(self) -> None:
        self._leave_sent = True
        self._member_id, self._generation = "", NO_GENERATION
        self._target = None

    def _send(self, request: Any, timeout_ms: int | None = None) -> Send:
        self._tickets += 1
        self._flight, self._asked = self._tickets, request
        return Send(self._flight, request, timeout_ms)

    def _beat(self, now_ms: int) -> Step:
        """Send a heartbeat if due, while the session exists."""
        if not self.is_member:
            return self._wait(self._due_ms if now_ms < self._due_ms else None)
        if now_ms < self._due_ms:
            return self._wait(self._due_ms)
        self._due_ms = now_ms + self._interval_ms
        return self._send(
            HeartbeatRequest(
                group_id=self._settings.group_id,
                generation_id=self._generation,
                member_id=self._member_id,
                group_instance_id=self._settings.group_instance_id,
            )
        )

    def _beaten(self, code: ErrorCode, now_ms: int) -> None:
        if code is ErrorCode.NONE:
            self._failures = 0
        elif code is ErrorCode.REBALANCE_IN_PROGRESS:
            if self._phase is Phase.STABLE:
                self._phase = Phase.UNJOINED
                if self._may_join():
                    self._due_ms = 0
        elif code in LOSING:
            self._start_over(now_ms)
        elif code in UNRELATED_TO_MEMBER:
            self._again(now_ms)
        else:
            self._fail(self._refusal(code))

    def _send_join(self) -> Send:
        self._phase, self._leads, self._rejoin = Phase.JOINING, False, False
        self._unknown = frozenset()
        return self._send(
            JoinGroupRequest(
                group_id=self._settings.group_id,
                session_timeout_ms=self._session_timeout_ms,
                rebalance_timeout_ms=self._settings.max_poll_interval_ms,
                member_id=self._member_id,
                group_instance_id=self._settings.group_instance_id,
                protocol_type=PROTOCOL_TYPE,
                protocols=[
                    JoinGroupRequestProtocol(name=strategy, metadata=self._metadata(strategy))
                    for strategy in self._strategies
                ],
            ),
            self._settings.max_poll_interval_ms + JOIN_SLACK_MS,
        )

    def _metadata(self, strategy: str) -> bytes:
        owned = frozenset(owned.name for owned in self._owned)
        generation = self._generation
        if strategy == STICKY:
            generation, owned = self._remembered
        elif self._generation == NO_GENERATION:
            owned = frozenset()
        return subscription_bytes(strategy, self._subscription.topics, owned, generation, self._settings.client_rack)

    def _joined(self, code: ErrorCode, response: JoinGroupResponse, now_ms: int) -> None:
        if code is ErrorCode.MEMBER_ID_REQUIRED:
            self._member_id = response.member_id
            self._phase, self._due_ms = Phase.UNJOINED, 0
        elif code in LOSING:
            self._start_over(now_ms)
        elif code in UNRELATED_TO_MEMBER or code is ErrorCode.REBALANCE_IN_PROGRESS:
            self._again(now_ms)
        elif code is not ErrorCode.NONE:
            self._fail(self._refusal(code))
        elif self._was_left_behind(response.generation_id):
            self._leave_generation(response.member_id)
        else:
            self._failures = 0
            self._member_id, self._generation = response.member_id, response.generation_id
            self._strategy = response.protocol_name or ""
            self._subscribers = []
            self._phase, self._due_ms = Phase.SYNCING, 0
            self._leads = response.leader == response.member_id
            if self._leads:
                self._lead(response, now_ms)

    def _was_left_behind(self, generation: int) -> bool:
        """Whether a generation went on without this static member, which may have given its partitions to others."""
        return self._is_static and bool(self._owned) and NO_GENERATION < self._generation < generation - 1

    def _lead(self, response: JoinGroupResponse, now_ms: int) -> None:
        try:
            self._subscribers = [
                subscriber_of(member.member_id, member.group_instance_id, self._strategy, member.metadata)
                for member in response.members
            ]
        except DecodeError as error:
            text = f"a member of group '{self._settings.group_id}' joined with a subscription that cannot be read"
            self._fail(ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"{text}: {error}"))
            return
        self._watched = self._unknown = frozenset(topic for member in self._subscribers for topic in member.topics)
        self._counts, self._used = {}, {}
        self._look_at_ms = now_ms + self._look_interval_ms()
        if response.skip_assignment:
            self._subscribers = []
        elif self._unknown:
            self._phase, self._due_ms = Phase.LEADING, now_ms + self._interval_ms

    def _check_taken_over(self) -> None:
        """A restarted leader that got its former assignment back assigns again if that assignment is outdated."""
        if (
            self._leads
            and self._used
            and any(one.partition >= self._used.get(one.topic, NONE).total for one in self._target or ())
        ):
            self._rejoin = True

    def _refresh_counts(self, now_ms: int) -> None:
        if self._leads and self._look_at_ms is not None and now_ms >= self._look_at_ms and self._phase is Phase.STABLE:
            self._unknown = self._watched
            self._look_at_ms = now_ms + self._look_interval_ms()

    def _look_interval_ms(self) -> int:
        """The time between two looks of the leader at the group's topics."""
        fetched = {owned.topic for owned in self._target or ()}
        age_ms = self._metadata_max_age_ms
        return age_ms if self._watched <= fetched else min(age_ms, LOOK_UNFETCHED_MS)

    def _send_sync(self, now_ms: int) -> Send:
        given: dict[str, list[TopicPartition]] = {}
        if self._leads and self._subscribers:
            self._used = {topic: self._counts.get(topic, NONE) for one in self._subscribers for topic in one.topics}
            given = assign(self._strategy, self._subscribers, self._used)
        return self._send(
            SyncGroupRequest(
                group_id=self._settings.group_id,
                generation_id=self._generation,
                member_id=self._member_id,
                group_instance_id=self._settings.group_instance_id,
                protocol_type=PROTOCOL_TYPE,
                protocol_name=self._strategy,
                assignments=[
                    SyncGroupRequestAssignment(member_id=member_id, assignment=assignment_bytes(partitions))
                    for member_id, partitions in given.items()
                ],
            ),
            self._settings.max_poll_interval_ms + JOIN_SLACK_MS,
        )

    def _synced(self, code: ErrorCode, response: SyncGroupResponse, now_ms: int) -> None:
        if code is ErrorCode.NONE:
            try:
                given = assignment_of(response.assignment)
            except DecodeError as error:
                text = (
                    f"the leader of group '{self._settings.group_id}' sent an assignment that cannot be read: {error}"
                )
                self._fail(ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, text))
                return
            self._failures = 0
            self._target = frozenset(Owned(*tp) for tp in given)
            self._look_at_ms = now_ms + self._look_interval_ms()
            self._check_taken_over()
            self._remembered = (self._generation, given)
            self._phase = Phase.STABLE
            self._due_ms = now_ms + self._interval_ms
        elif code is ErrorCode.REBALANCE_IN_PROGRESS:
            self._phase, self._due_ms = Phase.UNJOINED, 0
        elif code in LOSING:
            self._start_over(now_ms)
        elif code in UNRELATED_TO_MEMBER:
            self._phase = Phase.UNJOINED
            self._again(now_ms)
        else:
            self._fail(self._refusal(code))

    def _send_leave(self) -> Send:
        member = MemberIdentity(
            member_id=self._member_id, group_instance_id=self._settings.group_instance_id, reason="the consumer leaves"
        )
        return self._send(
            LeaveGroupRequest(group_id=self._settings.group_id, member_id=self._member_id, members=[member])
        )

    def _refusal(self, code: ErrorCode) -> ApiError:
        hints = {
            ErrorCode.FENCED_INSTANCE_ID: f"another member has taken over the instance id "
            f"'{self._settings.group_instance_id}'; every member needs its own",
            ErrorCode.INCONSISTENT_GROUP_PROTOCOL: "its members have no assignor in common with partition.assignment."
            f"strategy {', '.join(self._strategies)}; use one that all have",
            ErrorCode.INVALID_SESSION_TIMEOUT: f"session.timeout.ms is {self._session_timeout_ms}; choose one between "
            "the broker's group.min.session.timeout.ms and group.max.session.timeout.ms",
            ErrorCode.GROUP_MAX_SIZE_REACHED: "the group is full; raise group.max.size, or run fewer members",
        }
        hint = hints.get(code, "the coordinator says no more")
        return ApiError(code, f"group '{self._settings.group_id}' refuses this member: {hint}")
