"""A group coordinator in a world of its own: a manual clock, a list as the log, and timers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.codec import Blob, decode_prefix, encode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.reconcile import pending
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.gate_effects import AskNextRecords
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.ranged import FOLD_KEY
from anabranch.machines.groups.records import decode_record, encode_record
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.outcome import CancelTimer, Outcome, Parked, SetTimer
from anabranch.protocol.messages import consumer_protocol_assignment, consumer_protocol_subscription
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from anabranch.protocol.messages.consumer_protocol_assignment import ConsumerProtocolAssignment
from anabranch.protocol.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

GROUP = "g"
Entry = tuple[bytes, bytes | None, int]
"""Key, value and producer id of a record in the log; a marker has an empty key."""


def topic_id(name: str) -> UUID:
    """The id of the first topic of this name."""
    return UUID(bytes=name.encode()[:16].ljust(16, b"-"))


def topics(version: int = 1, **counts: int) -> Image:
    """Topics and how many partitions they have."""
    return Image(
        version, {name: TopicImage(topic_id(name), name, tuple(range(count))) for name, count in counts.items()}
    )


def partitions(names: str | None) -> list[TopicPartitions] | None:
    """Read `foo-0 foo-2 bar-1`."""
    if names is None:
        return None
    return [
        TopicPartitions(topic_id=topic_id(topic), partitions=sorted(numbers))
        for topic, numbers in _by_topic(names).items()
    ]


def subscription(*topics: str, owned: str = "", generation: int = -1, version: int = 3) -> bytes:
    """The subscription of a classic consumer in JoinGroup."""
    found = ConsumerProtocolSubscription(
        topics=list(topics),
        owned_partitions=[
            consumer_protocol_subscription.TopicPartition(topic=name, partitions=numbers)
            for name, numbers in _by_topic(owned).items()
        ],
        generation_id=generation,
    )
    return version.to_bytes(2) + b"".join(encode(found, version))


def assignment(owned: str, version: int = 3) -> bytes:
    """The assignment of one member by a classic leader."""
    made = ConsumerProtocolAssignment(
        assigned_partitions=[
            consumer_protocol_assignment.TopicPartition(topic=name, partitions=numbers)
            for name, numbers in _by_topic(owned).items()
        ]
    )
    return version.to_bytes(2) + b"".join(encode(made, version))


def assigned(data: Blob) -> str:
    """The partitions in the assignment of a SyncGroup response."""
    made = decode_prefix(ConsumerProtocolAssignment, data, int.from_bytes(data[:2]), 2)[0]
    return " ".join(
        sorted(f"{topic.topic}-{number}" for topic in made.assigned_partitions for number in topic.partitions)
    )


def _by_topic(names: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name in names.split():
        topic, _, number = name.rpartition("-")
        found.setdefault(topic, []).append(int(number))
    return found


class GroupWorld:
    """A coordinator, its log, its timers and the time."""

    def __init__(self, image: Image | None = None, settings: GroupSettings | None = None) -> None:
        self.settings = settings or GroupSettings()
        self.image = image or topics(foo=3)
        self.coordinator = Coordinator(self.settings, self.image)
        self.log: list[Entry] = []
        self.timers: dict[Hashable, int] = {}
        self.answers: dict[Hashable, Any] = {}
        self.now_ms = 1_000_000
        self.effects: list[Any] = []
        self.asked: list[AskNextRecords] = []
        self.next_records: dict[tuple[str, int], Callable[[int], int]] = {}
        """By topic and partition, the leader's answers; by default every offset has a record."""
        self.tickets = 0
        self.versions: dict[str, int] = {}

    # -- the shell -----------------------------------------------------------------------------------------------------

    def submit(self, decide: Callable[[Coordinator], Outcome[Any, Any]]) -> Any:
        """Decide, append, apply, set timers, answer."""
        outcome = decide(self.coordinator)
        producer_id = outcome.producer[0] if outcome.producer else -1
        for record in outcome.records:
            key, value = encode_record(record)
            self.log.append((key, value, producer_id))
            read = decode_record(key, value)
            assert read == record
            self.coordinator.apply(read, producer_id=producer_id)
        for timer in outcome.timers:
            match timer:
                case SetTimer(key, at_ms):
                    self.timers[key] = at_ms
                case CancelTimer(key):
                    self.timers.pop(key, None)
        for answer in outcome.answers:
            assert answer.ticket not in self.answers
            self.answers[answer.ticket] = answer.reply
        self.ring()
        for effect in outcome.effects:
            self.perform(effect)
        return outcome.reply

    def ring(self) -> None:
        """Let the timers ring that are set for now."""
        for key in [key for key, at_ms in self.timers.items() if at_ms <= self.now_ms and key[0] == "gates"]:  # type: ignore[index]
            if self.timers.pop(key, None) is not None:
                self.submit(lambda machine, key=key: machine.on_timer(key, self.now_ms))

    def perform(self, effect: Any) -> None:
        """Answer questions for next records; note everything else."""
        if not isinstance(effect, AskNextRecords):
            self.effects.append(effect)
            return
        self.asked.append(effect)
        found = {
            number: self.next_records.get((effect.topic, number), lambda offset: offset)(offset)
            for number, offset in effect.offsets.items()
        }
        self.submit(
            lambda machine: machine.next_records(effect.group_id, effect.topic_id, effect.offsets, found, self.now_ms)
        )

    def marker(self, producer_id: int, *, committed: bool) -> None:
        """End a transaction."""
        self.log.append((b"", b"1" if committed else b"0", producer_id))
        self.coordinator.apply_marker(producer_id, 0, committed)
        self.submit(lambda machine: machine.marked(producer_id, self.now_ms))
        self.submit(lambda machine: machine.on_timer(FOLD_KEY, self.now_ms))

    def advance(self, ms: int) -> None:
        """Let time pass, and timers ring."""
        until = self.now_ms + ms
        while due := [(at_ms, str(key), key) for key, at_ms in self.timers.items() if at_ms <= until]:
            at_ms, _, key = min(due)
            self.now_ms = max(self.now_ms, at_ms)
            del self.timers[key]
            self.submit(lambda machine, key=key: machine.on_timer(key, self.now_ms))
        self.now_ms = until

    def replayed(self, *, compact: bool = True) -> Coordinator:
        """Another coordinator that has read the log, as it is or with only the last value of every key."""
        machine = Coordinator(self.settings, self.image)
        last = {(key, producer_id): at for at, (key, _, producer_id) in enumerate(self.log)}
        for at, (key, value, producer_id) in enumerate(self.log):
            if not key:
                machine.apply_marker(producer_id, 0, value == b"1")
            elif not compact or producer_id >= 0 or last[key, producer_id] == at:
                record = decode_record(key, value)
                assert record is not None
                machine.apply(record, producer_id=producer_id)
        return machine

    def reload(self, *, compact: bool = False) -> None:
        """Let another coordinator take over."""
        self.coordinator = self.replayed(compact=compact)
        self.timers.clear()
        self.submit(lambda machine: machine.loaded(self.now_ms))

    def check(self) -> None:
        """Check that the durable state is the same after a replay, compacted or not."""
        for compact in (False, True):
            other = self.replayed(compact=compact)
            assert other.positions == self.coordinator.positions
            assert other.starts == self.coordinator.starts
            for group_id in other.groups.keys() | self.coordinator.groups.keys():
                live, loaded = self.coordinator.groups.get(group_id), other.groups.get(group_id)
                if isinstance(live, ConsumerGroup) or isinstance(loaded, ConsumerGroup):
                    assert live == loaded, group_id

    def set_topics(self, image: Image) -> None:
        """The metadata changed."""
        self.image = image
        self.submit(lambda machine: machine.topics_changed(image, self.now_ms))

    # -- the consumer protocol -----------------------------------------------------------------------------------------

    def beat(
        self,
        member: str,
        epoch: int,
        owned: str | None = None,
        *,
        topics: Iterable[str] | None = None,
        group: str = GROUP,
        connection: int = 0,
        **said: Any,
    ) -> ConsumerGroupHeartbeatResponse:
        """A heartbeat, whatever the answer."""
        request = ConsumerGroupHeartbeatRequest(
            group_id=group,
            member_id=member,
            member_epoch=epoch,
            subscribed_topic_names=None if topics is None else list(topics),
            topic_partitions=partitions(owned),
            **said,
        )
        caller = Caller("client", "/host", 1, "fresh", connection)
        answer = self.submit(lambda machine: machine.consumer_group_heartbeat(request, caller, self.now_ms))
        assert isinstance(answer, ConsumerGroupHeartbeatResponse)
        return answer

    def join(self, member: str, *, topics: Iterable[str] = ("foo",), **said: Any) -> ConsumerGroupHeartbeatResponse:
        """Join, with success."""
        said.setdefault("rebalance_timeout_ms", 60_000)
        answer = self.beat(member, 0, "", topics=topics, **said)
        assert answer.error_code == ErrorCode.NONE, answer
        return answer

    def leave(self, member: str, **said: Any) -> None:
        """Leave for good, with success."""
        answer = self.beat(member, -1, **said)
        assert answer.error_code == ErrorCode.NONE, answer

    @property
    def group(self) -> ConsumerGroup:
        """The group of the consumer protocol."""
        group = self.coordinator.groups[GROUP]
        assert isinstance(group, ConsumerGroup)
        return group

    def show(self) -> str:
        """The group as the proposal's examples write it."""
        group = self.group
        lines = [
            f"Group (epoch={group.epoch}) {' '.join(sorted(group.members))}".rstrip(),
            f"Target (epoch={group.target_epoch})",
        ]
        lines += [f"  {name} [{self.named(group.target(name))}]" for name in sorted(group.members)]
        lines.append("Members")
        for name, member in sorted(group.members.items()):
            text = f"  {name} epoch={member.epoch} [{self.named((*member.assigned, *member.revoking))}]"
            waits = self.named(pending(group, member))
            lines.append(f"{text} pending [{waits}]" if waits else text)
        return "\n".join(lines)

    def named(self, assignment: Iterable[tuple[UUID, tuple[int, ...]]]) -> str:
        """Partitions as `foo-0 foo-2`."""
        names = sorted((self.image.name_of(topic), number) for topic, numbers in assignment for number in numbers)
        return " ".join(f"{name}-{number}" for name, number in names)

    def told(self, answer: ConsumerGroupHeartbeatResponse) -> str | None:
        """The partitions in an answer."""
        if answer.assignment is None:
            return None
        return self.named([(entry.topic_id, tuple(entry.partitions)) for entry in answer.assignment.topic_partitions])

    # -- the classic protocol ------------------------------------------------------------------------------------------

    def join_classic(
        self,
        member: str,
        protocols: Mapping[str, bytes],
        *,
        version: int = 9,
        group: str = GROUP,
        session_timeout_ms: int = 30_000,
        rebalance_timeout_ms: int = 60_000,
        instance: str | None = None,
        protocol_type: str = "consumer",
        fresh: str = "fresh",
        connection: int = 0,
    ) -> JoinGroupResponse | Hashable:
        """JoinGroup: the answer, or the ticket under which it will be in `answers`."""
        request = JoinGroupRequest(
            group_id=group,
            session_timeout_ms=session_timeout_ms,
            rebalance_timeout_ms=rebalance_timeout_ms,
            member_id=member,
            group_instance_id=instance,
            protocol_type=protocol_type,
            protocols=[JoinGroupRequestProtocol(name=name, metadata=data) for name, data in protocols.items()],
        )
        return self._parked(
            lambda machine, ticket: machine.join_group(
                request, Caller("classic", "/host", version, fresh, connection), ticket, self.now_ms
            )
        )

    def sync_classic(
        self, member: str, generation: int, assignments: Iterable[Any] = (), *, group: str = GROUP
    ) -> SyncGroupResponse | Hashable:
        """SyncGroup: the answer, or its ticket."""
        request = SyncGroupRequest(
            group_id=group,
            generation_id=generation,
            member_id=member,
            assignments=list(assignments),
        )
        return self._parked(
            lambda machine, ticket: machine.sync_group(request, Caller("classic", "/host", 4), ticket, self.now_ms)
        )

    def beat_classic(self, member: str, generation: int, *, group: str = GROUP) -> ErrorCode:
        """Heartbeat."""
        request = HeartbeatRequest(group_id=group, generation_id=generation, member_id=member)
        answer = self.submit(lambda machine: machine.heartbeat(request, Caller(version=4), self.now_ms))
        return ErrorCode.of(answer.error_code)

    def leave_classic(self, member: str, *, group: str = GROUP) -> ErrorCode:
        """LeaveGroup."""
        request = LeaveGroupRequest(group_id=group, members=[MemberIdentity(member_id=member)])
        answer = self.submit(lambda machine: machine.leave_group(request, Caller(version=5), self.now_ms))
        return ErrorCode.of(answer.members[0].error_code)

    def _parked(self, decide: Callable[[Coordinator, int], Outcome[Any, Any]]) -> Any:
        self.tickets += 1
        ticket = self.tickets
        answer = self.submit(lambda machine: decide(machine, ticket))
        return answer.ticket if isinstance(answer, Parked) else answer
