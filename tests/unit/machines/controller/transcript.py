"""A cluster of obedient brokers that writes down what its controller decides, as text that can be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import reduce
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import leadership, nodes, reaper, resize, terms, topics
from anabranch.machines.controller.effects import (
    Decision,
    Effect,
    PublishMetadata,
    SendLeaderAndIsr,
    SendStopReplica,
)
from anabranch.machines.controller.layouts import ended_with
from anabranch.machines.controller.nodes import BrokerNode, DeleteNode, MetadataRecord, PutNode
from anabranch.machines.controller.state import ControllerState, apply
from anabranch.machines.outcome import SetTimer

TOPIC_ID = UUID(int=1)


class Cluster:
    """A controller whose decisions are persisted and applied at once, and brokers that answer when told to."""

    def __init__(self, *, partitions: int = 0, brokers: int = 1) -> None:
        self.state = ControllerState()
        self.journal: list[MetadataRecord] = []
        self.lines: list[str] = []
        self.requests: deque[SendLeaderAndIsr | SendStopReplica] = deque()
        self.roles: dict[int, leadership.Leadership] = {}
        self.epochs: dict[int, int] = {}
        self.submit(terms.decide_elected)
        for broker in range(1, brokers + 1):
            self.register(broker)
        if partitions:
            self.create(partitions)
            self.run()
        self.lines.clear()

    @classmethod
    def resized(cls, *counts: int, start: int) -> Cluster:
        """A cluster whose topic was resized to these counts, one after the other, and a text that begins after that."""
        cluster = cls(partitions=start)
        for count in counts:
            cluster.resize(count)
            cluster.run()
        cluster.text()
        return cluster

    def submit(self, decide: Callable[[ControllerState], Decision[object]]) -> object:
        """Decide, persist, apply, write down; requests wait until they are answered."""
        decision = decide(self.state)
        for record in decision.records:
            apply(self.state, record)
            if isinstance(record, PutNode | DeleteNode):
                self.journal.append(record)
                self.lines.append(_record(record))
        for effect in decision.effects:
            self.lines.append(_effect(effect))
            if isinstance(effect, SendLeaderAndIsr | SendStopReplica):
                self.requests.append(effect)
        self.lines += [f"timer {timer.key}" for timer in decision.timers if isinstance(timer, SetTimer)]
        assert reduce(apply, self.journal, ControllerState()) == self.state
        return decision.reply

    def text(self) -> str:
        """What was decided since the last call."""
        lines, self.lines = self.lines, []
        return "\n".join(lines)

    def register(self, broker_id: int, epoch: int = 1, *, unclean: bool = False) -> None:
        node = BrokerNode(broker_id, epoch)
        self.submit(lambda state: terms.decide_register_broker(state, node, unclean=unclean))

    def create(self, partitions: int, name: str = "t", **more: object) -> object:
        command = topics.CreateTopic(name, TOPIC_ID, partitions, **more)  # type: ignore[arg-type]
        return self.submit(lambda state: topics.decide_create_topic(state, command))

    def delete(self, name: str = "t") -> object:
        return self.submit(lambda state: topics.decide_delete_topic(state, topics.DeleteTopic(name)))

    def resize(self, count: int, **more: object) -> object:
        command = resize.ResizeTopic("t", count, **more)  # type: ignore[arg-type]
        return self.submit(lambda state: resize.decide_resize_topic(state, command))

    def cancel(self) -> object:
        return self.submit(lambda state: resize.decide_cancel_resize(state, "t"))

    def reap(self, **logs: tuple[int, int]) -> object:
        """Report log starts and ends: p2=(7, 7)."""
        seen = {
            int(name[1:]): reaper.LogRange(start, end, self.roles[int(name[1:])].leader_epoch)
            for name, (start, end) in logs.items()
        }
        return self.submit(lambda state: reaper.decide_reap(state, "t", seen))

    def answer(self, error: ErrorCode = ErrorCode.NONE) -> None:
        """The oldest request is performed, or fails with `error`, and is answered."""
        request = self.requests.popleft()
        if isinstance(request, SendLeaderAndIsr):
            errors = {role.partition: error or self._take(request, role) for role in request.roles}
            self.submit(lambda state: resize.decide_leader_and_isr_answered(state, request, errors, now_ms=1_000))
            return
        errors = {partition: error for partition, _ in request.partitions}
        if not error:
            for partition, _ in request.partitions:
                self.roles.pop(partition, None)
                self.epochs.pop(partition, None)
        self.submit(lambda state: topics.decide_stop_replica_answered(state, request, errors, now_ms=1_000))

    def run(self) -> None:
        """Answer everything until nothing is left."""
        while self.requests:
            self.answer()

    def _take(self, request: SendLeaderAndIsr, role: leadership.Role) -> ErrorCode:
        known = self.roles.get(role.partition)
        taken = leadership.take_role(known, request, role, self.epochs.get(role.partition, -1))
        if taken.leadership is not None:
            self.roles[role.partition] = taken.leadership
        if taken.start_epoch is not None:
            self.epochs[role.partition] = taken.start_epoch
        return taken.error


def _record(record: PutNode | DeleteNode) -> str:
    if isinstance(record, DeleteNode):
        return f"delete {record.path}"
    match record.path.split("/")[1:]:
        case ["brokers", "topics", name]:
            return f"write {name}: {_topic(nodes.read_topic(name, record.data))}"
        case ["brokers", "topics", name, "partitions", partition, "state"]:
            node = nodes.read_partition(record.path, record.data)
            start = f" from {node.start_offset}" if node.start_offset else ""
            return f"write {name}-{partition}: epoch {node.leader_epoch} at {node.leader}{start}"
        case _:
            return f"write {record.path} {record.data.decode()}"


def _topic(topic: nodes.Topic) -> str:
    layouts = " ".join(
        f"{layout.count}" + (f"({_map(ended)})" if (ended := ended_with(topic.ended, layout.number)) else "")
        for layout in topic.layouts
    )
    words = [f"layouts {layouts}", f"partitions {len(topic.partitions)}"]
    if topic.resize is not None:
        made = f" making {_list(topic.resize.assignment)}" if topic.resize.assignment else ""
        words.append(f"resize to {topic.resize.to}: {topic.resize.phase.value}{made}")
    if topic.removed:
        removed = " ".join(f"{p}@{gone.next_offset}" for p, gone in sorted(topic.removed.items()))
        words.append(f"removed {removed}")
    return ", ".join(words)


def _effect(effect: Effect) -> str:
    match effect:
        case SendLeaderAndIsr():
            roles = " ".join(
                f"{role.partition}:{role.leader_epoch}{'-' if role.retiring else ''}" for role in effect.roles
            )
            return f"  tell {effect.broker_id}: count {effect.undeleted_partition_count}, {roles}"
        case SendStopReplica():
            return f"  stop {effect.broker_id}: {' '.join(f'{p}:{epoch}' for p, epoch in effect.partitions)}"
        case PublishMetadata(names):
            return f"  publish {' '.join(names)}".rstrip()
        case _:
            return f"  {type(effect).__name__}"


def _map(epochs: object) -> str:
    return " ".join(f"{p}:{e}" for p, e in sorted(dict(epochs).items()))  # type: ignore[call-overload]


def _list(partitions: object) -> str:
    return " ".join(map(str, sorted(partitions)))  # type: ignore[call-overload]
