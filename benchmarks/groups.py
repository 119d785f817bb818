"""The group coordinator: how long it is kept from its heartbeats, and how soon a group has settled.

Sections: assignors, convergence, gates; those at a real broker are in `benchmarks.gates`. A bound is a side that always
takes as long.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any
from uuid import UUID

from anabranch.machines.clients.membership.consumer import ConsumerMember
from anabranch.machines.clients.membership.steps import Event, MemberSettings, Send, Subscription, TopicFacts, WaitUntil
from anabranch.machines.groups.assignors import Assignment, Assignors, Subscriber
from anabranch.machines.groups.assignors.planner import Planner
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.consumer.group import ConsumerGroup, GroupState
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.gate_effects import AskNextRecords
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.lineage import Lineage
from anabranch.machines.outcome import Outcome, SetTimer
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.runtime.collector import collector_paused
from benchmarks.gates import resize_gates
from benchmarks.harness import Bar, Result, Round, Scale, compare

# Assignors: from the coordinator's members, topics and target to the members whose target changes.

ASSIGNMENT_MS_MAX = 50.0


@dataclass(frozen=True)
class _Topic:
    name: str
    topic_id: UUID
    partitions: Sequence[int]
    retiring: Sequence[int] = ()


class _Group:
    """What a coordinator keeps of a group: members in the order of their joining, with random ids."""

    def __init__(self, members: int, topics: int, partitions: int) -> None:
        self.chance = random.Random(3)
        self.topics = {
            name: _Topic(name, self.uuid(), tuple(range(partitions)))
            for name in (f"topic-{number:04}" for number in range(topics))
        }
        self.ids = [str(self.uuid()) for _ in range(members)]

    def uuid(self) -> UUID:
        return UUID(int=self.chance.getrandbits(128))


Subscribe = Callable[[_Group], Iterator[Subscriber]]
"""Gives one member's subscription after the other, without end."""


def _all(group: _Group) -> Iterator[Subscriber]:
    everything = frozenset(group.topics)
    while True:
        yield Subscriber(everything)


def _classes(count: int, group: _Group) -> Iterator[Subscriber]:
    """So many different sets of half of the topics, one member after the other."""
    names = list(group.topics)
    sets = [frozenset(group.chance.sample(names, len(names) // 2)) for _ in range(count)]
    while True:
        yield from map(Subscriber, sets)


def _each_its_own(group: _Group) -> Iterator[Subscriber]:
    names = list(group.topics)
    while True:
        yield Subscriber(frozenset(group.chance.sample(names, max(1, len(names) // 10))))


def _assign(name: str, subscribe: Subscribe, sizes: tuple[int, int, int]) -> Mapping[str, float]:
    """Take a group from nothing to a target; then, each for itself, let members join and leave, and reload it."""
    group = _Group(*sizes)
    subscriptions = subscribe(group)
    members = dict(zip(group.ids, subscriptions, strict=False))
    target: dict[str, Assignment] = {}
    chosen = Assignors().get(name)

    def milliseconds(planner: Planner) -> float:
        began = time.perf_counter()
        changes = planner.plan(chosen, members, group.topics, target)
        taken = time.perf_counter() - began
        target.update(changes)
        return taken * 1_000

    planner = Planner(collector_paused)
    full = milliseconds(planner)
    joins, leaves = [], []
    for _ in range(5):
        members[str(group.uuid())] = next(subscriptions)
        joins.append(milliseconds(planner))
        leaver = group.chance.choice(list(members))
        del members[leaver], target[leaver]
        leaves.append(milliseconds(planner))
    reload = milliseconds(Planner(collector_paused))
    return {"full": full, "join": max(joins), "leave": max(leaves), "reload": reload}


def _always(milliseconds: float) -> Round:
    return lambda: dict.fromkeys(("full", "join", "leave", "reload"), milliseconds)


def _assigned(name: str, label: str, subscribe: Subscribe, bound: float | None, scale: Scale) -> list[Result]:
    sizes = scale.choose((10_000, 100, 1_000), (20, 10, 5))
    members, topics, partitions = sizes
    return compare(
        f"groups.{name}_{label}",
        what=f"{members:,} members, {topics:,} topics of {partitions:,} partitions, {label} subscriptions: CPU time of "
        "the one thread from the coordinator's mappings to the assignments that change. From nothing; the slowest of 5 "
        "joins and of 5 leaves; with a planner that is new to a target that stands, as after fail-over",
        sides={"anabranch": partial(_assign, name, subscribe, sizes), "allowed": _always(ASSIGNMENT_MS_MAX)},
        bars=[Bar(figure, "ms", "less", bound) for figure in ("full", "join", "leave")] + [Bar("reload", "ms", "less")],
        scale=scale,
    )


def uniform(scale: Scale) -> list[Result]:
    """The uniform assignor: all members subscribe to the same topics."""
    return _assigned("uniform", "equal", _all, 1.0, scale)


def range_(scale: Scale) -> list[Result]:
    """The range assignor: all members subscribe to the same topics."""
    return _assigned("range", "equal", _all, 1.0, scale)


def mixed(scale: Scale) -> list[Result]:
    """Both assignors: 100 different subscriptions, each to half of the topics."""
    return [
        result
        for name in ("uniform", "range")
        for result in _assigned(name, "100", partial(_classes, 100), None, scale)
    ]


def own(scale: Scale) -> list[Result]:
    """Both assignors: each member subscribes to a tenth of the topics, no two alike."""
    return [result for name in ("uniform", "range") for result in _assigned(name, "own", _each_its_own, None, scale)]


# Convergence: the coordinator and as many members, all as they ship, in simulated time.

INTERVALS_MAX = 3.0
LATENCY_MS = 5
"""One way."""
LETTING_GO_MS = 100
"""What an application takes to finish its work on partitions, or to take some."""


class _Settling:
    """A clock, a coordinator and members; a heap of what is to happen, when."""

    def __init__(self, topics: int, partitions: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_ms = 0
        images = {
            name: TopicImage(UUID(int=number + 1), name, range(partitions))
            for number, name in enumerate(f"topic-{number:04}" for number in range(topics))
        }
        self.partitions = topics * partitions
        self.facts = [TopicFacts(topic.name, topic.topic_id, topic.size) for topic in images.values()]
        self.settings = GroupSettings()
        self.coordinator = Coordinator(self.settings, Image(1, images))
        self.members: list[ConsumerMember] = []
        self._wakes: list[int] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, at_ms: int, do: Callable[[], None]) -> None:
        """Let something happen."""
        self._order += 1
        heapq.heappush(self._events, (at_ms, self._order, do))

    def join(self) -> None:
        """Another member begins."""
        number = len(self.members)
        member = ConsumerMember(MemberSettings("g"), str(UUID(int=self.chance.getrandbits(128))))
        self.members.append(member)
        self._wakes.append(0)
        member.on_topics(self.facts)
        member.subscribe(Subscription(frozenset(fact.name for fact in self.facts)))
        self._go_on(number)

    def run_until(self, at_ms: int) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= at_ms:
            self.now_ms, _, do = heapq.heappop(self._events)
            do()
        self.now_ms = at_ms

    def settled(self) -> bool:
        """Whether the group is stable, and its members have all there is, and know it."""
        group = self.coordinator.groups.get("g")
        assert isinstance(group, ConsumerGroup)
        return (
            group.state() is GroupState.STABLE
            and len(group.members) == len(self.members)
            and all(member.epoch == group.epoch and member.event() is None for member in self.members)
            and sum(len(member.owned) for member in self.members) == self.partitions
        )

    def settle(self, at_most_ms: int) -> int:
        """Let time pass until the group has settled; how long it took."""
        began_ms = self.now_ms
        while not self.settled():
            assert self.now_ms < began_ms + at_most_ms, "the group does not settle"
            self.run_until(self.now_ms + 10)
        return self.now_ms - began_ms

    def _go_on(self, number: int) -> None:
        member = self.members[number]
        while not isinstance(step := member.next(self.now_ms), WaitUntil):
            assert isinstance(step, Send)
            self.at(self.now_ms + LATENCY_MS, partial(self._heard, number, step))
        if step.at_ms is not None and not self.now_ms < self._wakes[number] <= step.at_ms:
            self._wakes[number] = step.at_ms
            self.at(step.at_ms, partial(self._go_on, number))
        event = member.take()
        if event is not None:
            self.at(self.now_ms + LETTING_GO_MS, partial(self._did, number, event))

    def _did(self, number: int, event: Event) -> None:
        self.members[number].done(event, self.now_ms)
        self._go_on(number)

    def _heard(self, number: int, send: Send) -> None:
        outcome = self.coordinator.consumer_group_heartbeat(send.request, Caller("client", "/host", 1), self.now_ms)
        for record in outcome.records:
            self.coordinator.apply(record)
        self.at(self.now_ms + LATENCY_MS, partial(self._answered, number, send, outcome.reply))

    def _answered(self, number: int, send: Send, reply: ConsumerGroupHeartbeatResponse) -> None:
        self.members[number].on_response(send.ticket, reply, self.now_ms)
        self._go_on(number)


def _converged(members: int, joining: int, topics: int, partitions: int, seeds: Iterator[int]) -> Mapping[str, float]:
    """Let a group settle, let members join it all at once, and count the intervals until it has settled again."""
    world = _Settling(topics, partitions, next(seeds))
    interval_ms = world.settings.consumer_heartbeat_interval_ms
    for _ in range(members):
        world.at(world.chance.randrange(interval_ms), world.join)
    world.run_until(interval_ms)
    world.settle(20 * interval_ms)
    world.run_until(world.now_ms + world.chance.randrange(interval_ms))
    for _ in range(joining):
        world.join()
    return {"intervals": world.settle(20 * interval_ms) / interval_ms}


def convergence(scale: Scale) -> list[Result]:
    """How many heartbeat intervals of simulated time a group takes to settle after a tenth more members joined."""
    members, joining, topics, partitions = scale.choose((1_000, 100, 10, 1_000), (10, 2, 2, 10))
    seeds = itertools.count()
    return compare(
        "groups.convergence",
        what=f"{members:,} members of the consumer protocol, our own, at any point of their heartbeat intervals, have "
        f"{topics * partitions:,} partitions; {joining:,} more join at one moment. Simulated time until the group is "
        f"stable and every member has its partitions and knows it, with {LATENCY_MS} ms to the coordinator and "
        f"{LETTING_GO_MS} ms for each application to let go, or to take; each round with another seed",
        sides={
            "anabranch": partial(_converged, members, joining, topics, partitions, seeds),
            "allowed": lambda: {"intervals": INTERVALS_MAX},
        },
        bars=[Bar("intervals", "heartbeat intervals", "less", 1.0)],
        scale=scale,
    )


# Gates: heartbeats of a member whose partitions wait.

HEARTBEAT_MS_MAX = 1.0
LOOK_MS_MAX = 10.0
UNREAD = 10
RUNS = 3


class _Gated:
    """A group of one member in a topic that has doubled: all of its new partitions wait for the old ones."""

    def __init__(self, partitions: int, old: int) -> None:
        self.old = old
        self.decisions_ms: list[float] = []
        self.now_ms = 1_000_000
        self.timers: dict[Hashable, int] = {}
        self.looks_ms: list[float] = []
        self.topic_id = UUID(int=1)
        self.coordinator = Coordinator(GroupSettings(), Image(1, {"t": self._topic(range(old), None)}))
        self._beat(0, rebalance_timeout_ms=300_000, subscribed_topic_names=["t"], topic_partitions=[])
        cuts = dict.fromkeys(range(old), UNREAD)
        image = Image(2, {"t": self._topic(range(partitions), Lineage.of_ends(old, (old, partitions), (cuts,)))})
        self._decide(lambda machine: machine.topics_changed(image, self.now_ms))
        self.epoch = self._beat(1)
        self._beat(self.epoch)

    def _topic(self, partitions: Sequence[int], lineage: Lineage | None) -> TopicImage:
        return TopicImage(self.topic_id, "t", partitions, lineage=lineage, log_end=lambda number: 2 * UNREAD)

    def _decide(self, decide: Callable[[Coordinator], Outcome[Any, Any]]) -> Any:
        began = time.thread_time()
        outcome = decide(self.coordinator)
        self.decisions_ms.append((time.thread_time() - began) * 1_000)
        for record in outcome.records:
            self.coordinator.apply(record)
        for timer in outcome.timers:
            if isinstance(timer, SetTimer):
                self.timers[timer.key] = timer.at_ms
            else:
                self.timers.pop(timer.key, None)
        for effect in outcome.effects:
            assert isinstance(effect, AskNextRecords)
            given = (effect.group_id, effect.topic_id, effect.offsets, effect.offsets, self.now_ms)
            self._decide(methodcaller("next_records", *given))
        return outcome.reply

    def _beat(self, epoch: int, **said: Any) -> int:
        request = ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=epoch, **said)
        reply = self._decide(
            lambda machine: machine.consumer_group_heartbeat(request, Caller("c", "/h", 1, "", 1), self.now_ms)
        )
        assert not reply.error_code, reply
        return int(reply.member_epoch)

    def look(self) -> None:
        """Let the group's timers ring that are due."""
        key = ("gates", "g")
        for _ in range(1_000):
            if self.timers.get(key, self.now_ms + 1) > self.now_ms:
                return
            del self.timers[key]
            began = time.thread_time()
            self._decide(lambda machine: machine.on_timer(key, self.now_ms))
            self.looks_ms.append((time.thread_time() - began) * 1_000)

    def commit(self, partition: int, offset: int) -> None:
        part = OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
        request = OffsetCommitRequest(
            group_id="g",
            member_id="m",
            generation_id_or_member_epoch=self.epoch,
            topics=[OffsetCommitRequestTopic(name="t", partitions=[part])],
        )
        self._decide(lambda machine: machine.offset_commit(request, Caller(version=9), self.now_ms))

    def heartbeats(self, count: int) -> tuple[list[float], list[float]]:
        """Beat and commit again and again, a second apart; return how long heartbeats took, and looks, in ms."""
        for _ in range(3):
            self.now_ms += 1_000
            self.look()
            self._beat(self.epoch)
        self.looks_ms.clear()
        beats_ms = []
        for number in range(count):
            self.now_ms += 1_000
            self.commit(number % self.old, 1 + number // self.old % (UNREAD - 1))
            self.look()
            began = time.thread_time()
            self._beat(self.epoch)
            beats_ms.append((time.thread_time() - began) * 1_000)
        return beats_ms, self.looks_ms


def _slowest(runs: Sequence[Sequence[float]]) -> float:
    """The slowest step of work that was done several times: of each step the quickest of its times.

    A step of 2 ms takes 20 ms once in a thousand times where a virtual machine is stopped meanwhile, and the clock of
    the thread goes on.
    """
    slowest: float = max(min(times) for times in zip(*runs, strict=True))
    return slowest


def gates(scale: Scale) -> list[Result]:
    """How long a heartbeat takes whose member waits at closed gates, and the coordinator's look at them."""
    partitions, beats = scale.choose((5_000, 60), (20, 5))

    def measured() -> Mapping[str, float]:
        with collector_paused():
            runs = [_Gated(partitions, partitions // 2).heartbeats(beats) for _ in range(RUNS)]
        return {"heartbeat": _slowest([beat for beat, _ in runs]), "look": _slowest([look for _, look in runs])}

    return compare(
        "coordinator.gates",
        what=f"one member of the consumer protocol owns {partitions // 2:,} partitions, each with {UNREAD} unread "
        f"records before the cut, and waits for as many behind closed gates; it commits in one and beats, "
        f"{beats} times. CPU milliseconds of the slowest heartbeat, and of the slowest look at what has changed, of "
        f"each the quickest of {RUNS} runs",
        sides={
            "anabranch": measured,
            "allowed": lambda: {"heartbeat": HEARTBEAT_MS_MAX, "look": LOOK_MS_MAX},
        },
        bars=[Bar("heartbeat", "ms", "less", 1.0), Bar("look", "ms", "less", 1.0)],
        scale=scale,
    )


def first_gates(scale: Scale) -> list[Result]:
    """The slowest decision of a group whose topic has grown from one partition, until all gates are decided."""
    partitions = scale.choose(5_000, 200)

    def decided() -> list[float]:
        group = _Gated(partitions, 1)
        for _ in range(3):
            for _ in range(partitions):
                group.now_ms += 5
                group.look()
                if group.timers.get(("gates", "g"), 0) > group.now_ms + 100:
                    break
            group.heartbeats(1)
        return group.decisions_ms

    def measured() -> Mapping[str, float]:
        with collector_paused():
            return {"decision": _slowest([decided() for _ in range(RUNS)])}

    return compare(
        "coordinator.first_gates",
        what=f"one member of the consumer protocol in a topic of {partitions:,} partitions with one at creation, whose "
        "10 records are unread. CPU milliseconds of the slowest decision, from the resize until all gates are decided, "
        f"of each the quickest of {RUNS} runs",
        sides={"anabranch": measured, "allowed": lambda: {"decision": LOOK_MS_MAX}},
        bars=[Bar("decision", "ms", "less", 1.0)],
        scale=scale,
    )


BENCHMARKS = {
    "uniform": uniform,
    "range": range_,
    "mixed": mixed,
    "own": own,
    "convergence": convergence,
    "gates": gates,
    "first_gates": first_gates,
    "resize_gates": resize_gates,
}
