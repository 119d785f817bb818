"""What running resizes wait for, and since when: each partition that holds one up is logged once, shown and measured.

Which partitions these are is decided in `machines.controller.views`; the times are of this controller's term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
LOGGED_MAX = 20
"""How many partitions of a topic that begin to hold its resize up at once have a line in the log."""
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


class Found(NamedTuple):
    """The partitions that the resize of a topic waits for."""

    waiting: Mapping[int, Waiting]
    """Ascending."""
    begun: Sequence[Waiting]
    """Those that were not among them before, or waited otherwise."""


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
        self._known: dict[str, Mapping[int, Waiting]] = {}

    def compare(self, waits: Mapping[str, Iterable[ResizeWait]]) -> dict[str, Found]:
        """Compare what resizes of topics wait for now with what is known; in any thread, for there may be much."""
        now_ms = self._now_ms()
        return {name: self._found(name, waited, now_ms) for name, waited in waits.items()}

    def _found(self, name: str, waited: Iterable[ResizeWait], now_ms: int) -> Found:
        before = self._known.get(name, {})
        waiting: dict[int, Waiting] = {}
        begun: list[Waiting] = []
        for wait in sorted(waited):
            known = before.get(wait.partition)
            if known is None or known.wait != wait:
                known = Waiting(wait, now_ms if known is None else known.since_ms)
                begun.append(known)
            waiting[wait.partition] = known
        return Found(waiting, begun)

    def note(self, state: ControllerState, found: Mapping[str, Found]) -> None:
        """Note what resizes of topics wait for now; log partitions that begin to hold one up."""
        for name, (waiting, begun) in found.items():
            before = self._known.pop(name, {})
            for each in begun[:LOGGED_MAX]:
                self._log(state, name, each)
            if len(begun) > LOGGED_MAX:
                events.warning("resize waits for more partitions", topic=name, partitions=len(begun) - LOGGED_MAX)
            if waiting:
                self._known[name] = waiting
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
        return list(self._known.get(topic, {}).values())

    def running(self, state: ControllerState, topics: Iterable[str] | None) -> Iterator[RunningResize]:
        """The resizes that run, in any order: of these topics, or of all; bears changes meanwhile."""
        now_ms = self._now_ms()
        for name in list(state.resizing) if topics is None else topics:
            topic = state.topics.get(name)
            if topic is not None and topic.resize is not None and name not in state.deleting:
                old, new = counts(topic)
                phase, cancelable = topic.resize.phase, may_undo(topic)
                yield RunningResize(name, topic.topic_id, old, new, phase, cancelable, self.of(name), now_ms)

    def all(self) -> Iterator[tuple[str, Waiting, int]]:
        """Every topic and partition that a resize waits for, and how long it has, in ms; bears changes meanwhile."""
        now_ms = self._now_ms()
        return ((name, it, now_ms - it.since_ms) for name, found in [*self._known.items()] for it in found.values())

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
