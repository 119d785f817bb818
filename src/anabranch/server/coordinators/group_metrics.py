"""The metrics of group coordinators in KIP-848, under the names of its MBeans; computed when metrics are requested.

Its threads are one loop here: the idle ratio is that of the loop's thread between two requests, and the queue is of the
replies that wait for the disk.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial

from anabranch.runtime.metrics import Looked, Metrics, Sample
from anabranch.server.coordinators.groups import Groups
from anabranch.server.coordinators.shard_state import ShardState

PREFIX = "kafka_server_group_coordinator_metrics_"
WINDOW_S = 30.0
"""The window of rates, as long as a sample of Kafka's `Rate`."""
READS_MAX = 60
CONSUMER_STATES = ("Empty", "Assigning", "Reconciling", "Stable", "Dead")
CLASSIC_STATES = ("Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Dead")
PARTITION_STATES = {"loading": ShardState.LOADING, "active": ShardState.ACTIVE, "failed": ShardState.FAILED}


def describe(groups: Groups, metrics: Metrics) -> None:
    """Register the metrics of the group coordinators."""
    _describe_gates(groups, metrics)
    _describe_groups(groups, metrics)
    metrics.gauge(
        f"{PREFIX}member_metadata_bytes",
        "Memory for groups, their members, and their metadata and assignments.",
        lambda: groups.metadata.held,
    )
    metrics.gauge(f"{PREFIX}offset_bytes", "Memory for committed offsets.", groups.offsets_size)
    metrics.gauge(
        f"{PREFIX}individual_commit_ranges",
        "Ranges of offsets that groups have committed one by one, about 200 bytes each.",
        groups.ranges_held,
    )
    metrics.gauge(
        f"{PREFIX}regex_matches_bytes",
        "Memory for the names of topics that patterns match.",
        lambda: groups.matches_size,
    )


def _describe_gates(groups: Groups, metrics: Metrics) -> None:
    """Register the metric of gates that open by time."""
    metrics.gauge(
        f"{PREFIX}gates_opened_by_time_count",
        "Gates that opened although a position that they waited on had records left.",
        lambda: float(groups.gates_opened_by_time),
    )


def _counted(groups: Groups, found: Counter[tuple[str, str]]) -> Iterator[Looked]:
    """Count the groups by protocol and state."""
    for shard in groups:
        if shard.active:
            for state, looked in shard.machine.states():
                found[state] += 1
                yield looked


def _describe_groups(groups: Groups, metrics: Metrics) -> None:
    """Register KIP-848's metrics."""
    gauge, gauges = metrics.gauge, metrics.gauges
    idle = _IdleRatio()

    def group_count() -> Iterator[Sample | Looked]:
        found: Counter[tuple[str, str]] = Counter()
        yield from _counted(groups, found)
        for protocol in ("consumer", "classic"):
            yield {"protocol": protocol}, float(sum(count for (kind, _), count in found.items() if kind == protocol))

    def by_state(protocol: str, known: tuple[str, ...]) -> Iterator[Sample | Looked]:
        found: Counter[tuple[str, str]] = Counter()
        yield from _counted(groups, found)
        for state in known:
            yield {"state": state.lower()}, float(found[protocol, state])

    def partition_count() -> list[Sample]:
        return [
            ({"state": name}, float(sum(shard.state is state for shard in groups)))
            for name, state in PARTITION_STATES.items()
        ]

    def load_times() -> list[float]:
        return [shard.load_ms / 1000 for shard in groups if shard.active] or [0.0]

    def rebalances(protocol: str) -> float:
        return float(sum(shard.machine.rebalances[protocol] for shard in groups if shard.active))

    gauges(f"{PREFIX}group_count", "Groups, by protocol.", group_count)
    gauges(
        f"{PREFIX}consumer_group_count",
        "Groups of the consumer protocol, by state.",
        lambda: by_state("consumer", CONSUMER_STATES),
    )
    gauges(
        f"{PREFIX}classic_group_count",
        "Groups of the classic protocol, by state.",
        lambda: by_state("classic", CLASSIC_STATES),
    )
    gauges(f"{PREFIX}partition_count", "Partitions of __consumer_offsets, by state.", partition_count)
    gauge(
        f"{PREFIX}event_queue_size", "Replies that wait for the disk.", lambda: sum(shard.waiting for shard in groups)
    )
    gauge(
        f"{PREFIX}parked_requests",
        "Requests that wait for other members.",
        lambda: sum(shard.parked for shard in groups),
    )

    def offsets(what: str) -> float:
        return float(sum(shard.machine.offsets.counts[what] for shard in groups if shard.active))

    for name, doc, count in (
        ("consumer_group_rebalance", "Epochs of groups of the consumer protocol", partial(rebalances, "consumer")),
        ("classic_group_rebalance", "Generations of groups of the classic protocol", partial(rebalances, "classic")),
        ("offset_commit", "Committed offsets, those of transactions included,", partial(offsets, "commit")),
        ("offset_expiration", "Offsets removed as unused for too long", partial(offsets, "expiration")),
        ("offset_deletion", "Offsets deleted by OffsetDelete", partial(offsets, "deletion")),
    ):
        gauge(f"{PREFIX}{name}_count", f"{doc} since their partition was loaded.", count)
        gauge(f"{PREFIX}{name}_rate", f"{doc} per second, over the last {WINDOW_S:.0f} s.", Rate(count).read)
    gauge(
        f"{PREFIX}partition_load_time_max_seconds",
        "Longest time of the last loading of a partition.",
        lambda: max(load_times()),
    )
    gauge(
        f"{PREFIX}partition_load_time_avg_seconds",
        "Average time of the last loading of a partition.",
        lambda: sum(load_times()) / len(load_times()),
    )
    gauge(f"{PREFIX}thread_idle_ratio_min", "How idle the loop was since metrics were last read.", idle.read)
    gauge(f"{PREFIX}thread_idle_ratio_avg", "The same: the broker has one loop.", lambda: idle.ratio)


class Rate:
    """Events per second of a count, over the last `WINDOW_S` or since the count was first read."""

    def __init__(self, count: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._reads: deque[tuple[float, float]] = deque(maxlen=READS_MAX + 1)
        """Times and counts of reads, oldest first: at most one is older than the window."""

    def read(self) -> float:
        """The rate. A count that fell, because its partition was loaded again, begins a new window."""
        now, count, reads = self._clock(), self._count(), self._reads
        if reads and count < reads[-1][1]:
            reads.clear()
        while len(reads) > 1 and reads[1][0] <= now - WINDOW_S:
            reads.popleft()
        if not reads or now - reads[-1][0] >= WINDOW_S / READS_MAX:
            reads.append((now, count))
        then, before = reads[0]
        return (count - before) / (now - then) if now > then else 0.0


class _IdleRatio:
    """The share of the time that the reading thread was not busy, between two reads."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self._wall, self._busy = time.monotonic(), time.thread_time()

    def read(self) -> float:
        """The ratio since the last read."""
        wall, busy = time.monotonic(), time.thread_time()
        if wall > self._wall:
            self.ratio = min(1.0, max(0.0, 1.0 - (busy - self._busy) / (wall - self._wall)))
        self._wall, self._busy = wall, busy
        return self.ratio
