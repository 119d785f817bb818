"""Samples of what is appended, for the histograms of load: taken beside the loop, never by an append.

Every INTERVAL_MS those partitions are looked at whose topic allows fetches of ranges. Of one that has grown a few
batches are read from a place drawn at random among the records that are new, and the kernel that filters for sharers
counts them; they stand for all that is new. So producers pay nothing, and a broker without such topics does nothing.

The bounds: SAMPLED_MAX partitions at a time, in turns; SAMPLE_SIZE bytes of each, or one batch; HISTOGRAMS_MAX
histograms, those of the partitions that came first; and as long a pause as it takes for the samples to have cost no
more than one COST_PARTS-th of a processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import thread_time

from anabranch.base.errors import DecodeError
from anabranch.base.ids import TopicPartition
from anabranch.machines.keyspace import Interval
from anabranch.machines.partition.load import UNOBSERVED, LoadHistogram, PartitionLoad
from anabranch.machines.partition.sharing import Stretch
from anabranch.records.filtering import Load, Scatter, Selection, Spread
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLogger
from anabranch.runtime.mapped import read_in
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.turns import in_turns
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.storage.interface import OfflineLogError, OffsetOutOfRangeError, Slice, fetched

events = EventLogger("load")
INTERVAL_MS = 1_000
SAMPLE_SIZE = 64 * 1024
EXPANDED_SIZE_MAX = 16 * 1024 * 1024
"""A batch that expands to more is not counted."""
SAMPLED_MAX = 32
LOOKED_AT_MAX = 2_000
"""Partitions of which it is looked up whether they have grown, at a time."""
BEGUN_AT_A_TIME = 200
"""Those that are looked at before other work has its turn: 1 to 2 ms where each is seen for the first time."""
HISTOGRAMS_MAX = 10_000
COST_PARTS = 200
NO_TARGET = Selection((), 0)


class _Observed:
    """A partition that is observed."""

    __slots__ = ("end", "histogram", "partition")

    def __init__(self, partition: Partition, histogram: LoadHistogram, end: int) -> None:
        self.partition = partition
        self.histogram = histogram
        self.end = end
        """The records below it are counted."""


class LoadSampling:
    """The histograms of one broker."""

    def __init__(
        self,
        replicas: Replicas,
        scatter_now: Callable[[], Scatter],
        stretch_of: Callable[[Partition, int], Stretch | None],
        clock: Clock,
        chance: Chance,
        metrics: Metrics,
    ) -> None:
        self._replicas = replicas
        self._scatter_now = scatter_now
        self._stretch_of = stretch_of
        self._clock = clock
        self._chance = chance
        self._observed: dict[TopicPartition, _Observed] = {}
        self._turn: Iterator[Partition] = iter(())
        self._thread = ThreadPoolExecutor(1, "load")
        self._spent_s = 0.0
        """Processor time of the last run."""
        counter = metrics.counter
        self._samples = counter("anabranch_load_samples_total", "Samples of appended records, for load by key.")
        self._cpu_s = counter("anabranch_load_cpu_seconds_total", "Processor time of these samples.")
        metrics.gauge("anabranch_load_partitions", "Partitions whose load by key is known.", lambda: len(self))

    def __len__(self) -> int:
        return len(self._observed)

    def close(self) -> None:
        """Give up the sample that waits for the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def pause_ms(self) -> int:
        """The time to the next run."""
        return max(INTERVAL_MS, int(self._spent_s * COST_PARTS * 1000))

    def of(self, partition: Partition) -> PartitionLoad:
        """The load of a partition; UNOBSERVED if nothing is known of it."""
        observed = self._observed.get(partition.name)
        if observed is None or observed.partition is not partition:
            return UNOBSERVED
        return observed.histogram.rates(self._clock.monotonic_ms())

    async def run(self) -> None:
        """Sample some of the partitions that have grown."""
        self._spent_s = 0.0
        sampled = 0
        async for _ in in_turns(range(min(LOOKED_AT_MAX, len(self._replicas.range_fetched))), BEGUN_AT_A_TIME):
            partition = next(self._turn, None)
            if partition is None:
                self._begin_turn()
                partition = next(self._turn, None)
            if partition is None:
                return
            if self._replicas.range_fetched.get(partition.name) is not partition or partition.leadership is None:
                continue
            observed = self._observed.get(partition.name)
            if observed is None or observed.partition is not partition:
                self._observe(partition)
            elif partition.log.high_watermark != observed.end and partition.offline_reason is None:
                try:
                    await self._sample(partition, observed)
                except (OSError, OfflineLogError, OffsetOutOfRangeError) as error:
                    events.debug("not sampled", partition=partition.name, reason=error)
                sampled += 1
                if sampled == SAMPLED_MAX:
                    break

    def _begin_turn(self) -> None:
        """Begin with the first partition again; forget those that are gone."""
        known = self._replicas.range_fetched
        for name in [name for name in self._observed if name not in known]:
            del self._observed[name]
        self._turn = iter([*known.values()])

    def _observe(self, partition: Partition) -> None:
        """Begin to observe a partition."""
        end = partition.log.high_watermark
        stretch = self._stretch_of(partition, end)
        if stretch is None:
            return
        if len(self._observed) >= HISTOGRAMS_MAX and partition.name not in self._observed:
            return
        histogram = LoadHistogram(Interval(*stretch.held), self._clock.monotonic_ms())
        self._observed[partition.name] = _Observed(partition, histogram, end)

    async def _sample(self, partition: Partition, observed: _Observed) -> None:
        """Count what was appended since the last sample."""
        log = partition.log
        end, first = log.high_watermark, max(observed.end, log.log_start)
        now_stretch = self._stretch_of(partition, end)
        if now_stretch is None:
            return  # A resize runs. The records count later.
        observed.end = end
        observed.histogram.cover(Interval(*now_stretch.held), self._clock.monotonic_ms())
        if end <= first:
            return
        offset = first + self._chance.below(end - first)
        stretch = self._stretch_of(partition, offset)
        if stretch is None or stretch.held != observed.histogram.held:
            return
        block = await fetched(log.read(offset, SAMPLE_SIZE, end=end if stretch.end is None else min(end, stretch.end)))
        if block is None:
            return
        spread = Spread(stretch.initial, stretch.held)
        load, took_s = await asyncio.get_running_loop().run_in_executor(
            self._thread, _counted, self._scatter_now(), block, spread
        )
        self._spent_s += took_s
        self._cpu_s.add(took_s)
        if load is not None:
            self._samples.add()
            observed.histogram.add(load, end - first, self._clock.monotonic_ms())


def _counted(scatter: Scatter, block: Slice, spread: Spread) -> tuple[Load | None, float]:
    """Count the records of a block, of one batch if they are compressed; None if they cannot be.

    Second, the processor time of that in seconds.
    """
    began = thread_time()
    load: Load | None = Load(spread.held)
    try:
        scatter(read_in(block.view()), NO_TARGET, spread, record_size_max=EXPANDED_SIZE_MAX, work_size_max=0, load=load)
    except DecodeError:
        load = None
    return load, thread_time() - began
