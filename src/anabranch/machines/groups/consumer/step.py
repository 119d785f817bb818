"""The inputs of a decision about one group of the consumer protocol, and the steps that decisions share.

A heartbeat in quiet times writes nothing and copies nothing: the group is copied with the first record.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.consumer.group import (
    LEFT_FOR_A_WHILE,
    ConsumerGroup,
    Member,
    current_record,
    gone_records,
    group_record,
    target_epoch_record,
    target_record,
)
from anabranch.machines.groups.consumer.shares import NO_SHARES
from anabranch.machines.groups.consumer.sharing import Planned
from anabranch.machines.groups.consumer.target import (
    AssignorFailed,
    Computation,
    Offer,
    Targets,
    client_assignor,
    metadata_hash,
    missing_assignor,
    offers_of,
    said_by,
    server_assignor,
    subscriptions,
)
from anabranch.machines.groups.gate import Gate
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.groups.settings import ConsumerGroupSettings, GroupSettings
from anabranch.machines.outcome import Draft


@dataclass(slots=True)
class Live:
    """The volatile state of a group: safe to lose, since it is rebuilt."""

    connections: dict[str, int] = field(default_factory=dict)
    """The newest connection on which each member spoke."""
    rejoining: set[str] = field(default_factory=set)
    """Classic members that were called to join again, and have not yet."""
    pending: dict[str, None] = field(default_factory=dict)
    """Ids given with MEMBER_ID_REQUIRED to classic members that did not join yet, oldest first."""
    computation: Computation | None = None
    targets: Targets = field(default_factory=Targets)
    reported: tuple[str, str] | None = None
    """The failure of a server-side assignor that was reported last: its name, and the type of its error."""


class Step:
    """One decision about one group."""

    def __init__(
        self,
        group: ConsumerGroup,
        live: Live,
        *,
        image: Image,
        regexes: Regexes,
        settings: GroupSettings,
        gate: Gate,
        now_ms: int,
        begun: tuple[ConsumerGroup, Draft[CoordinatorRecord]] | None = None,
    ) -> None:
        """`begun` is a draft that has records already, with the group as it will be when they are applied."""
        self._group = group
        self._decided: ConsumerGroup | None = None
        """The group as it will be; copied with the first record."""
        self.draft: Draft[CoordinatorRecord] = Draft()
        if begun is not None:
            self._decided, self.draft = begun
        self._ended = False
        self.live = live
        self.epoch_before = group.epoch
        self.image = image
        self.regexes = regexes
        self.settings = settings
        self.gate = gate
        self.now_ms = now_ms
        self._configs: ConsumerGroupSettings | None = None

    @property
    def group(self) -> ConsumerGroup:
        """The group, with the decisions made so far."""
        return self._group if self._decided is None else self._decided

    @property
    def is_unchanged(self) -> bool:
        """Whether no decision about the group was made so far."""
        return self._decided is None

    @property
    def group_id(self) -> str:
        return self._group.group_id

    @property
    def configs(self) -> ConsumerGroupSettings:
        """The settings of this group."""
        if self._configs is None:
            self._configs = self.settings.of(self._group.group_id)
        return self._configs

    def put(self, *records: CoordinatorRecord) -> None:
        """Decide that this is so."""
        assert not self._ended
        if self._decided is None:
            self._decided = self._group.copy()
        self.draft.write(*records)
        for record in records:
            self._decided.apply(record)

    def put_last(self, member: Member) -> None:
        """Decide a member's assignment, last of all: `group` does not show it, so that nothing is copied."""
        assert not self._ended
        self._ended = True
        self.draft.write(current_record(self.group_id, member.member_id, member))

    # -- connections ---------------------------------------------------------------------------------------------------

    def spoke(self, member_id: str, caller: Caller) -> bool:
        """Remember on which connection a member speaks now; whether it is known to have spoken there before."""
        known = self.live.connections.get(member_id) == caller.connection
        self.live.connections[member_id] = caller.connection
        return not known

    def is_late(self, member_id: str, caller: Caller) -> bool:
        """Whether the member has used a newer connection since: requests on this one are stale.

        A client that went back to an older one for good is heard when its session is over, as a new member.
        """
        return caller.connection < self.live.connections.get(member_id, 0)

    # -- timers --------------------------------------------------------------------------------------------------------

    def keep_session(self, member: Member) -> None:
        """Expect to hear from the member again within the session timeout."""
        classic = member.described.classic
        timeout_ms = self.configs.session_timeout_ms if classic is None else classic.session_timeout_ms
        self.draft.set_timer(("session", self._group.group_id, member.member_id), self.now_ms + timeout_ms)

    def expect_within_rebalance_timeout(self, kind: str, member: Member) -> None:
        """Give the member its rebalance timeout for something; `kind` names the timer."""
        timeout_ms = member.described.rebalance_timeout_ms
        self.draft.set_timer((kind, self.group_id, member.member_id), self.now_ms + timeout_ms)

    def stop_expecting(self, kind: str, member_id: str) -> None:
        """Cancel the member's rebalance timer."""
        self.draft.cancel_timer((kind, self.group_id, member_id))

    # -- epochs and targets --------------------------------------------------------------------------------------------

    def next_epoch(self) -> None:
        """Something changed that assignments depend on."""
        group = self.group
        topics = subscriptions(group, self.image, self.regexes)
        self.put(group_record(self.group_id, group.epoch + 1, metadata_hash(topics, self.image)))

    def look_at_topics(self) -> bool:
        """Start a new epoch if the topics that the group subscribes to are others than they were; whether so."""
        group = self.group
        if not group.members:
            return False
        topics = subscriptions(group, self.image, self.regexes)
        now = metadata_hash(topics, self.image)
        if now == group.metadata_hash:
            return False
        self.put(group_record(self.group_id, group.epoch + 1, now))
        return True

    def assign(self) -> None:
        """Compute the target for the group's epoch if it is due, or have a member compute it."""
        group = self.group
        if group.target_epoch == group.epoch:
            return
        offer = client_assignor(offers_of(member.described) for member in self.group.members.values())
        if offer is not None and self.ask(offer):
            return
        self.live.computation = None
        self.draft.cancel_timer(("compute", self.group_id))
        self.put()
        if group.members:
            name = server_assignor(said_by(group), self.settings.consumer_assignors)
            changes, parts = self._planned(name)
            for member_id, target in changes.items():
                self.put(target_record(self.group_id, member_id, target, shares=parts.get(member_id, NO_SHARES)))
            for member_id in group.told.keys() - changes.keys():
                shares = group.target_shares.get(member_id, NO_SHARES)
                self.put(target_record(self.group_id, member_id, group.target(member_id), shares=shares))
        self.put(target_epoch_record(self.group_id, self.group.epoch))

    def _planned(self, name: str) -> Planned:
        """The targets that change; after a failure of the assignor, reported once, members keep what they may."""
        live, group = self.live, self.group
        failure: AssignorFailed | None = None
        try:
            changes = live.targets.plan(
                name,
                self.settings.assignors,
                group,
                self.image,
                self.regexes,
                self.settings.shares_max(self.group_id),
            )
        except Exception as error:  # A plug-in's or ours: no other group of the shard is concerned.
            changes = live.targets.kept(group, self.image, self.regexes)
            failure = AssignorFailed(self.group_id, name, error)
        else:
            missing = missing_assignor(said_by(group), self.settings.consumer_assignors)
            if missing is not None:
                failure = AssignorFailed(self.group_id, missing, None)
        about = None if failure is None else (failure.assignor, type(failure.error).__name__)
        if failure is not None and about != live.reported:
            self.draft.perform(failure)
        live.reported = about
        return changes

    def ask(self, offer: Offer) -> bool:
        """Choose the member that computes the target, unless one is chosen; False without a candidate."""
        asked = self.live.computation
        group = self.group
        if asked is not None and asked.assignor.name == offer.name and asked.member_id in group.members:
            return True
        tried = set() if asked is None else asked.tried
        able = [
            member_id
            for member_id, member in sorted(group.members.items())
            if member.described.classic is None and member.epoch != LEFT_FOR_A_WHILE
        ]
        if not able:
            return False
        untried = [member_id for member_id in able if member_id not in tried]
        if not untried:
            tried = set()
        self.live.computation = Computation((untried or able)[0], group.epoch, offer, tried)
        self.draft.cancel_timer(("compute", self.group_id))
        return True

    def expect_target(self, computation: Computation) -> None:
        """Start the timeout of the chosen member with the first heartbeat that asks it for a target."""
        if not computation.told:
            computation.told = True
            timeout_ms = self.group.members[computation.member_id].described.rebalance_timeout_ms
            self.draft.set_timer(("compute", self.group_id), self.now_ms + timeout_ms)

    # -- members -------------------------------------------------------------------------------------------------------

    def remove(self, *member_ids: str, forget: bool = True) -> None:
        """Remove members, and begin the epoch that reassigns their partitions.

        Without `forget`, they may be unaware of it: their requests on older connections stay without effect.
        """
        for member_id in member_ids:
            self.put(*gone_records(self.group_id, member_id))
            self.gate.forget(member_id)
            if forget:
                self.live.connections.pop(member_id, None)
            for kind in ("session", "rebalance", "join", "sync"):
                self.stop_expecting(kind, member_id)
        self.next_epoch()
        self.assign()
        self.gate.ring(self.draft)
