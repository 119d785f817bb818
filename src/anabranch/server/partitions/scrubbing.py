"""The scrub of all logs: finds damage in what nobody reads, at a bounded rate, beside everything else.

A pass looks at every partition once, from another one on each time, so that passes that a restart ends leave none out
for ever. A batch that has changed takes its partition offline (`storage.log.scrub`), as any other damage does: were the
batches behind it served, readers would pass over records that were acknowledged.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

from anabranch.runtime.chance import Chance
from anabranch.runtime.events import EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.storage.interface import OfflineLogError
from anabranch.storage.log import scrub
from anabranch.storage.log.batch_files import Source
from anabranch.storage.log.log import LocalLog

events = EventLogger("scrub")
PAUSED_MIN_S = 0.02


class _StoppedError(Exception):
    """The broker stops."""


class Scrubbing:
    """The scrub of one broker's logs."""

    def __init__(self, replicas: Replicas, metrics: Metrics, chance: Chance, rate: Callable[[], int]) -> None:
        """`rate`: bytes per second, read again and again."""
        self._replicas = replicas
        self._chance = chance
        self._rate = rate
        self._stopping = threading.Event()
        self._ahead_s = 0.0
        self._paused_at = 0.0
        count = metrics.counter
        self._bytes = count("anabranch_scrub_bytes_total", "Bytes of batches whose checksums were compared.")
        self._passes = count("anabranch_scrub_passes_total", "Passes over all logs.")
        self._damaged = count("anabranch_scrub_damage_total", "Batches that have changed since they were written.")
        self._failures = count("anabranch_scrub_failures_total", "Segments that could not be read.")

    def stop(self) -> None:
        """End the pass that is under way."""
        self._stopping.set()

    async def run(self) -> None:
        """Do one pass."""
        partitions = list(self._replicas)
        first = self._chance.below(len(partitions)) if partitions else 0
        for partition in partitions[first:] + partitions[:first]:
            try:
                await self.run_partition(partition)
            except _StoppedError:
                return
            except (OSError, OfflineLogError) as error:
                self._failures.add()
                events.warning("log not scrubbed", partition=partition.name, reason=error)
            except Exception as error:  # A defect, which concerns this partition alone.
                self._failures.add()
                events.error("log not scrubbed", partition=partition.name, exception=error)
            await asyncio.sleep(0)
        self._passes.add()

    async def run_partition(self, partition: Partition) -> None:
        """Scrub the log of a partition, until it goes offline. OSError, OfflineLogError."""
        log = partition.log
        if not isinstance(log, LocalLog) or not self._serves(partition):
            return
        for compared in scrub.settled(log):
            source = compared.source
            if not self._serves(partition):
                return
            try:
                work = partial(scrub.scrub, log.disk, log.directory, source, self._pause)
                finding = await self._replicas.in_scrubber(work)
            except FileNotFoundError:
                continue  # It was deleted, or compacted, meanwhile.
            self._bytes.add(source.size)
            if finding is not None and self._serves(partition) and scrub.is_as_it_was(log, compared):
                self._damaged.add()
                await self._take_offline(partition, log, finding, source)
                return

    def _serves(self, partition: Partition) -> bool:
        return partition.offline_reason is None and self._replicas.get(*partition.name) is partition

    async def _take_offline(self, partition: Partition, log: LocalLog, finding: scrub.Finding, source: Source) -> None:
        partition.take_offline(str(finding))
        with self._replicas.held(partition):
            try:
                await self._replicas.in_scrubber(partial(scrub.note, log.disk, log.directory, finding, source))
            except OSError as error:
                events.warning("finding not noted: the next start does not know it", reason=error)

    def _pause(self, size: int) -> None:
        """Wait in the scrub's thread, so that it reads no more than the rate; what it is ahead adds up."""
        now = time.monotonic()
        self._ahead_s = max(0.0, self._ahead_s - (now - self._paused_at)) + size / self._rate()
        self._paused_at = now
        if self._stopping.is_set() or (self._ahead_s > PAUSED_MIN_S and self._stopping.wait(self._ahead_s)):
            raise _StoppedError
