"""What running resizes wait for, and since when: each partition that holds one up is logged once, shown and measured.

Which partitions these are is decided in `machines.controller.views`; the times are of this controller's term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.nodes import MetadataRecord, Phase
from anabranch.machines.controller.roles import counts, may_undo
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.controller.views import ResizeWait, resize_waits, topics_of
from anabranch.runtime.events import EventLogger

events = EventLogger("controller")
NAMED_MAX = 3
"""How many partitions a message names."""
REASONS = {
    ErrorCode.LEADER_NOT_AVAILABLE: "its broker is not running",
    ErrorCode.KAFKA_STORAGE_ERROR: "its log cannot be opened, written or synced",
    ErrorCode.REQUEST_TIMED_OUT: "its broker does not answer",
}


class Waiting(NamedTuple):
    """One partition that a resize waits for."""

    wait: ResizeWait
    since_ms: int

    @property
    def reason(self) -> str:
        """Why, in words."""
        return REASONS.get(self.wait.error, f"its leader answers {self.wait.error.name}")


class RunningResize(NamedTuple):
    """A resize that runs, and what holds it up."""

    topic: str
    topic_id: UUID
    from_count: int
    to_count: int
    phase: Phase
    cancelable: bool
    waits: list[Waiting]
    now_ms: int


def waits_after(state: ControllerState, records: Iterable[MetadataRecord]) -> dict[str, tuple[ResizeWait, ...]]:
    """What the resizes of the topics wait for that these applied records concern."""
    return {name: resize_waits(state, name) for name in topics_of(state, records)}


class ResizeWaits:
    """The partitions that running resizes wait for, by topic."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._known: dict[str, dict[int, Waiting]] = {}

    def note(self, state: ControllerState, waits: Mapping[str, Iterable[ResizeWait]]) -> None:
        """Note what resizes of topics wait for now; log each partition that begins to hold one up."""
        for name, waited in waits.items():
            before = self._known.pop(name, {})
            found: dict[int, Waiting] = {}
            for wait in waited:
                known = before.get(wait.partition)
                if known is not None and known.wait == wait:
                    found[wait.partition] = known
                    continue
                since_ms = self._now_ms() if known is None else known.since_ms
                found[wait.partition] = waiting = Waiting(wait, since_ms)
                self._log(state, name, waiting)
            if found:
                self._known[name] = found
            elif before:
                events.info("resize waits no more", topic=name, partitions=len(before))

    def _log(self, state: ControllerState, name: str, waiting: Waiting) -> None:
        events.warning(
            "resize waits for a partition",
            topic=name,
            to=state.topics[name].undeleted_partition_count,
            partition=waiting.wait.partition,
            broker=waiting.wait.broker_id,
            reason=waiting.reason,
            remedy=_remedy(name, cancelable=may_undo(state.topics[name])),
        )

    def of(self, topic: str) -> list[Waiting]:
        """What the resize of a topic waits for, by partition, ascending."""
        return [waiting for _, waiting in sorted(self._known.get(topic, {}).items())]

    def running(self, state: ControllerState, topics: Iterable[str] | None) -> list[RunningResize]:
        """List the resizes that run, by topic name: of these topics, or of all."""
        now_ms = self._now_ms()
        names = state.topics.keys() if topics is None else state.topics.keys() & set(topics)
        found = []
        for name in sorted(names - state.deleting):
            topic = state.topics[name]
            if topic.resize is not None:
                old, new = counts(topic)
                phase, cancelable = topic.resize.phase, may_undo(topic)
                waits = self.of(name)
                found.append(RunningResize(name, topic.topic_id, old, new, phase, cancelable, waits, now_ms))
        return found

    def all(self) -> Iterable[tuple[str, Waiting, int]]:
        """Every topic and partition that a resize waits for, and how long it has, in ms."""
        now_ms = self._now_ms()
        return ((name, it, now_ms - it.since_ms) for name, found in self._known.items() for it in found.values())

    def text(self, topic: str) -> list[str]:
        """The sentences that tell a client what the resize of a topic waits for; none where it goes on."""
        waiting = self.of(topic)
        if not waiting:
            return []
        now_ms = self._now_ms()
        named = [
            f"partition {it.wait.partition} on broker {it.wait.broker_id}, for {(now_ms - it.since_ms) / 1000:.0f} s: "
            f"{it.reason}"
            for it in waiting[:NAMED_MAX]
        ]
        if len(waiting) > NAMED_MAX:
            named.append(f"and {len(waiting) - NAMED_MAX} more")
        return [f"It waits for {'; '.join(named)}.", f"See `anabranch topic describe {topic}`."]


def _remedy(topic: str, *, cancelable: bool) -> str:
    cancel = f", or cancel the resize: anabranch topic resize {topic} --cancel" if cancelable else ""
    return f"bring the partition back (its log directory, its disk){cancel}"
