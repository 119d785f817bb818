"""How much a decision looks at, in partitions, so that the shell can tell what would hold up the event loop.

A weight decides nothing: whatever it is, the decision is the same. It is an estimate that takes a few microseconds, is
0 for what costs the same however many partitions there are, and otherwise is too large rather than too small. What a
decision adds up per partition takes from 0.3 us (`LOOKED_AT` of them weigh one) to 10 us, when it is handed out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from anabranch.base.errors import ApiError
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import LEFT_FOR_A_WHILE, Assignment, ConsumerGroup, Member
from anabranch.machines.groups.gate import is_idle
from anabranch.machines.groups.gatekeeper import Gatekeeper
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.offsets import TOPIC_IDS_SINCE, Offsets
from anabranch.machines.groups.positions import Positions
from anabranch.machines.groups.quiet import describes_nothing
from anabranch.machines.groups.regex import Regexes

if TYPE_CHECKING:
    from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
    from anabranch.protocol.messages.consumer_group_position import ConsumerGroupPositionRequest
    from anabranch.protocol.messages.join_group import JoinGroupRequest
    from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup
    from anabranch.protocol.messages.sync_group import SyncGroupRequest
    from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest

LOOKED_AT = 10
"""Partitions that are only looked at, or copied, and weigh as much as one that is handed out."""
GATES_LOOKED_AT = 2
"""Partitions of a group whose gates are looked at in the time in which one is handed out: each takes 1 to 5 us."""
RANGES_LOOKED_AT = 2
"""Ranges of transactions that are joined in the time in which one partition is handed out: each takes 3 us."""
BYTES_READ = 32
"""Bytes of subscriptions and assignments that are read in the time in which a partition is handed out."""
LAST_FEW = 2
"""Members that a rebalance may still wait for when a request or a timer ends it: its own, and one that never joined."""
JOINING = 0


class Weights:
    """The part of a coordinator that weighs its decisions before they are made."""

    groups: Mapping[str, ConsumerGroup | ClassicGroup]
    keeper: Gatekeeper
    offsets: Offsets
    regexes: Regexes

    @property
    @abstractmethod
    def image(self) -> Image: ...

    @property
    @abstractmethod
    def positions(self) -> Positions: ...

    def weight_of_quiet(self, group_id: str, member_id: str) -> int:
        """The weight of a ConsumerGroupHeartbeat that says nothing: none in quiet times."""
        group = self.groups.get(group_id)
        weight = self.positions.unread_count(group_id)
        if isinstance(group, ConsumerGroup) and (member := group.members.get(member_id)) is not None:
            weight += self.weight_of_member(group, member)
        return weight

    def weight_of_heartbeat(self, request: ConsumerGroupHeartbeatRequest) -> int:
        """The weight of a ConsumerGroupHeartbeat."""
        group = self.groups.get(request.group_id)
        owned = sum(len(topic.partitions) for topic in request.topic_partitions or ())
        owned += self.positions.unread_count(request.group_id)
        member = group.members.get(request.member_id) if isinstance(group, ConsumerGroup) else None
        quiet = request.member_epoch > JOINING and describes_nothing(request)
        if isinstance(group, ConsumerGroup) and member is not None and quiet:
            return owned + self.weight_of_member(group, member)
        if request.member_epoch <= LEFT_FOR_A_WHILE:
            return 0 if member is None else _held(member)
        names = request.subscribed_topic_names or ()
        return (
            owned
            + self._weight_of_names(names, request.subscribed_topic_regex)
            + self.weight_of_group(request.group_id)
        )

    def weight_of_member(self, group: ConsumerGroup, member: Member) -> int:
        """The weight of moving a member one step towards its target, and of the target if that is due."""
        if group.epoch != group.target_epoch:
            return self.weight_of_group(group.group_id)
        if is_idle(self.keeper, group, member.member_id):
            return 0
        changing = 0 if member.epoch == group.target_epoch and not member.revoking else len(group.holders) // LOOKED_AT
        return changing + _held(member) + _count(group.target(member.member_id))

    def weight_of_group(self, group_id: str) -> int:
        """The weight of a new target for a group: what its members subscribe to, and what they hold."""
        group = self.groups.get(group_id)
        if group is None or not group.members:
            return 0
        names = self.keeper.topics_of(group, self.keeper.of(group_id))
        held = len(group.holders) if isinstance(group, ConsumerGroup) else 0
        return held + self._weight_of_names(names, None)

    def weight_of_position(self, request: ConsumerGroupPositionRequest) -> int:
        """The weight of a ConsumerGroupPosition: what it and the one before it name, and what the member holds."""
        group, gates = self.groups.get(request.group_id), self.keeper.known(request.group_id)
        weight = sum(1 + len(topic.partitions) for topic in request.topics)
        weight += self.positions.unread_count(request.group_id)
        if gates is not None:
            parked = gates.questions.parked.get(request.member_id)
            weight += 0 if parked is None else len(parked.known)
            weight += len(gates.wanted_of.get(request.member_id, ()))
        member = group.members.get(request.member_id) if isinstance(group, ConsumerGroup) else None
        if isinstance(group, ConsumerGroup) and member is not None:
            weight += self.weight_of_member(group, member) // LOOKED_AT
        return weight

    def weight_of_reset(self, topic_id: UUID, asked: Mapping[int, int]) -> int:
        """The weight of a question for first offsets: of each group that hears it, its members and what is asked."""
        groups = [self.groups.get(group_id) for group_id in self.keeper.hearing.get(topic_id, ())]
        members = sum(len(group.members) for group in groups if group is not None)
        topic = self.image.by_id.get(topic_id)
        size = 0 if topic is None else topic.size
        return (members + len(groups) * (1 + len(asked)) + size) // LOOKED_AT

    def weight_of_topics(self, image: Image) -> int:
        """The weight of other topics: of each group that may be concerned, what these have."""
        before = self.image
        differing = image.differences(before)
        sizes = sum(
            max(topic.size for topic in (before.by_name.get(name), image.by_name.get(name)) if topic is not None)
            for name in differing
            if name in before.by_name or name in image.by_name
        )
        resized = any(topic.was_resized for name in differing if (topic := image.by_name.get(name)) is not None)
        return sizes * (1 + len(self.groups)) + (self.positions.groups_most // LOOKED_AT if resized else 0)

    def weight_of_timer(self, key: Any) -> int:
        """The weight of what is decided when a timer rings."""
        match key:
            case ("gates", str(group_id)):
                group, gates = self.groups.get(group_id), self.keeper.known(group_id)
                if group is None or gates is None:
                    return 0
                held = len(group.holders) if isinstance(group, ConsumerGroup) else 0
                return held // GATES_LOOKED_AT + gates.questions.known + self.positions.unread_count(group_id)
            case ("fold" | "folded", *folded):
                producer_id, number = folded or (-1, -1)
                change = self.offsets.in_transactions.upcoming((producer_id, number))
                return 0 if change is None else self.positions.unread_count(change.group_id)
            case ("purgatory", str(group_id)):
                return self.offsets.in_transactions.weight_of_waiting(group_id) // RANGES_LOOKED_AT
            case ("compute" | "balance", str(group_id)):
                return self.weight_of_group(group_id)
            case ("classic", str(group_id), "join" | "sync"):
                return len(group.members) if (group := self.groups.get(group_id)) is not None else 0
            case ("classic", str(group_id), *_):
                return self.weight_of_classic(group_id, None)
            case (str(), str(group_id), str()):
                return self.weight_of_group(group_id) if isinstance(self.groups.get(group_id), ConsumerGroup) else 0
        return 0

    def weight_of_loading(self) -> int:
        """The weight of what is decided when the log is read."""
        return sum(len(group.holders) if isinstance(group, ConsumerGroup) else 1 for group in self.groups.values())

    def weight_of_marker(self, producer_id: int) -> int:
        """The weight of the end of a transaction: the offsets, and the ranges, that it has committed."""
        return self.positions.pending_count(producer_id) + self.offsets.in_transactions.open_weight(producer_id)

    def _weight_of_names(self, names: Iterable[str], regex: str | None) -> int:
        by_name = self.image.by_name
        found = sum(topic.size for name in names if (topic := by_name.get(name)) is not None)
        if regex:
            try:
                matched = self.regexes.matches(regex, self.image)
            except ApiError:  # It is refused.
                return found
            found += sum(topic.size for name in matched if (topic := by_name.get(name)) is not None)
        return found

    def weight_of_classic(self, group_id: str, member_id: str | None) -> int:
        """The weight of a request of the classic protocol that concerns one member, or all for None.

        Of a classic group all are looked at where one of the last that it waits for comes or goes.
        """
        group = self.groups.get(group_id)
        if isinstance(group, ClassicGroup):
            ends = member_id is None and group.initial is None and len(group.joining) + LAST_FEW >= len(group.members)
            return len(group.members) if ends else 0
        if group is None:
            return 0
        if member_id is None:
            return self.weight_of_group(group_id)
        member = group.members.get(member_id)
        return 0 if member is None else self.weight_of_member(group, member)

    def weight_of_join(self, request: JoinGroupRequest) -> int:
        """The weight of a JoinGroup: a static member that comes back is compared with what the group is assigned."""
        group = self.groups.get(request.group_id)
        size = 0
        if isinstance(group, ClassicGroup) and request.group_instance_id in group.static:
            size = sum(len(member.assignment) for member in group.members.values())
            size += 2 * sum(len(protocol.metadata) for protocol in request.protocols)
        return size // BYTES_READ + self.weight_of_classic(request.group_id, None)

    def weight_of_sync(self, request: SyncGroupRequest) -> int:
        """The weight of a SyncGroup: the assignments that a leader brings."""
        return len(request.assignments) + self.weight_of_classic(request.group_id, request.member_id)

    def weight_of_offsets(self, group_id: str) -> int:
        """The weight of a look at committed offsets of a group, beside those that are asked for."""
        return self.positions.unread_count(group_id)

    def weight_of_txn_commit(self, request: TxnOffsetCommitRequest) -> int:
        """The weight of a TxnOffsetCommit: ranges may wait for those of all open transactions."""
        ranges = self.offsets.in_transactions.weight_of(request)
        return self.weight_of_offsets(request.group_id) + ranges // RANGES_LOOKED_AT

    def weight_of_fetch(self, asked: OffsetFetchRequestGroup, version: int) -> int:
        """The weight of answering committed offsets: a partition may have 100,000 ranges, which are copied."""
        weight = self.weight_of_offsets(asked.group_id)
        individual = self.offsets.individual
        if not individual.count:
            return weight
        by_id = version >= TOPIC_IDS_SINCE
        names = ((self.image.name_of(it.topic_id) if by_id else it.name, it) for it in asked.topics or ())
        ranges = sum(
            individual.count_of(asked.group_id, (name, partition))
            for name, topic in names
            for partition in topic.partition_indexes
        )
        return weight + ranges // LOOKED_AT

    def weight_of_committed(self, group_id: str) -> int:
        """The weight of listing all that a group has committed."""
        return self.positions.unread_count(group_id) + len(self.positions.read_of_group(group_id)) // LOOKED_AT

    def weight_of_deletion(self, group_id: str) -> int:
        """The weight of deleting all that a group has committed."""
        return self.positions.unread_count(group_id) + len(self.positions.read_of_group(group_id))

    def weight_of_view(self, group_id: str) -> int:
        """The weight of describing a group: of its partitions only those are looked at that wait."""
        gates = self.keeper.known(group_id)
        waiting = 0 if gates is None else len(gates.by_time)
        waiting += 0 if gates is None else sum(len(made.closed) for made in list(gates.evaluated.values()))
        return waiting // LOOKED_AT


def _held(member: Member) -> int:
    return _count(member.assigned) + _count(member.revoking)


def _count(partitions: Assignment) -> int:
    return sum(len(numbers) for _, numbers in partitions)
