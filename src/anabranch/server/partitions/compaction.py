"""The upkeep of compacted topics: cleans dirty logs with their families, and folds retiring partitions back.

One step at a time, in a round for each topic: finish segments that a resize has ended, or that have waited too long,
clean the logs that are due, fold retiring partitions back (`folding`). Which are due, and in which order, is decided by
`machines.cleaning`, what may go by `machines.compaction`; the files are read and written by `storage.log.cleaner` in a
thread of its own, and replaced by `storage.log.replacing`. A log that cannot be read is left out of its family, and a
topic whose round fails does not end the rounds of others; both are logged and counted.

Here one broker leads all partitions of a topic. In a fleet the other logs of a family are other leaders': their part of
the evidence, and what they remove, would be asked for through `server.cluster.peers.Peers`, keys in, places out; the
order of steps stays as it is, because each of them only relies on records that are durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from anabranch.base.errors import ErrorCode
from anabranch.machines.cleaning import UNLIMITED_MS, Urgency, is_finished, rank
from anabranch.machines.compaction import family_of, may_fold
from anabranch.machines.lineage import NO_CUTS, Lineage
from anabranch.runtime.events import EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.folding import FoldBack
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.storage.interface import OfflineLogError
from anabranch.storage.log import cleaner
from anabranch.storage.log.cleaner import Cleaned, Member
from anabranch.storage.log.evidence import UnreadableLogError
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.marks import clean_to, postpone_tombstones
from anabranch.storage.log.replacing import finishing

events = EventLogger("compaction")
MEASURED_AT_A_TIME = 64
"""Partitions whose dirt is measured before other work has its turn."""


class TopicShape(NamedTuple):
    """A topic as the cluster knows it."""

    lineage: Lineage
    partitions: Collection[int]
    """All that exist, whether or not their logs can be opened."""


class Compaction:
    """The compaction of all topics with `cleanup.policy=compact`."""

    def __init__(
        self,
        replicas: Replicas,
        shape_of: Callable[[str], TopicShape | None],
        metrics: Metrics,
        emptied: Callable[[str], None],
    ) -> None:
        """`shape_of` finds a topic, None without one; `emptied` is called for a topic with an emptied partition."""
        self._replicas = replicas
        self._shape_of = shape_of
        self._emptied = emptied
        count = metrics.counter
        self._runs = count("anabranch_compaction_runs_total", "Cleanings of logs of compacted topics.")
        self._saved = count("anabranch_compaction_bytes_saved_total", "Bytes removed by compaction.")
        self._failures = count("anabranch_compaction_failures_total", "Logs or topics that could not be compacted.")
        self._folded = count(
            "anabranch_compaction_folded_records_total", "Records of retiring partitions appended to their survivors."
        )
        self._emptied_partitions = count(
            "anabranch_compaction_emptied_partitions_total", "Retiring partitions that were folded back whole."
        )

    async def run(self) -> None:
        """Do one round for every compacted topic, that with the most urgent log first."""
        most: dict[str, tuple[bool, Urgency]] = {}
        for place, each in enumerate(self._replicas, 1):
            if each.settings.log.compact:
                topic = each.name.topic
                most[topic] = max(most.get(topic, rank(None)), rank(self._urgency(each)))
            if place % MEASURED_AT_A_TIME == 0:
                await asyncio.sleep(0)
        for topic in sorted(most, key=lambda topic: most[topic], reverse=True):
            try:
                await self.run_topic(topic)
            except Exception as error:
                expected = isinstance(error, OSError | OfflineLogError)
                self._failed(topic, error, defect=None if expected else error)
            await asyncio.sleep(0)

    async def run_topic(self, topic: str) -> None:
        """Do one round for a topic. A partition that fails does not end the round of the others."""
        partitions = sorted(self._replicas.of_topic(topic), key=lambda each: each.name.partition)
        partitions.sort(key=lambda each: rank(self._urgency(each)), reverse=True)
        names = [each.name.partition for each in partitions]
        shape = self._shape_of(topic)
        for work in (self._clean_if_due, self._fold_back):
            for number in names:
                subject = self._ready(topic, number)
                if subject is None or shape is None:
                    continue
                try:
                    await work(subject, shape)
                except (OSError, OfflineLogError) as error:
                    self._failed(subject.name, error)
                except Exception as error:  # A defect, which concerns this partition alone.
                    self._failed(subject.name, error, defect=error)
                await asyncio.sleep(0)

    def _failed(self, name: object, reason: Exception, defect: Exception | None = None) -> None:
        self._failures.add()
        if defect is None:
            events.warning("not compacted", partition=name, reason=reason)
        else:
            events.error("not compacted", partition=name, exception=defect)

    def _urgency(self, partition: Partition) -> Urgency | None:
        """How urgent the cleaning of a log is, by what is synced; None as well where it cannot be read."""
        log = partition.log
        if self._ready(*partition.name) is not partition or not isinstance(log, LocalLog):
            return None
        member = Member(log, stable=partition.last_stable_offset, recovery_point=log.recovery_point)
        try:
            return cleaner.urgency(member, self._replicas.age.now_ms())
        except OSError:
            return None  # Cleaning it says why.

    # -- cleaning ----------------------------------------------------------------------------------------------------

    async def _clean_if_due(self, subject: Partition, shape: TopicShape) -> None:
        log = subject.log
        assert isinstance(log, LocalLog)
        cuts = shape.lineage.cuts.get(subject.name.partition, NO_CUTS)
        if not subject.settings.log.compact:
            return
        now_ms, finished = self._replicas.age.now_ms(), False
        if cuts.ends:  # Old records of keys that moved away need not wait for new ones to be cleaned.
            finished = log.finish_segment(cuts.ends[-1])
        rules = cleaner.rules_of(log)
        if rules.lag_max_ms < UNLIMITED_MS and is_finished(cleaner.active_since_ms(log), rules, now_ms):
            finished = log.finish_segment(log.end) or finished
        if finished:
            await log.commit()
        if self._urgency(subject) is None or self._ready(*subject.name) is not subject:
            return
        family, complete = await self._family(subject, shape, dirty_from=clean_to(log))
        while True:
            try:
                await self._clean(subject, family, complete=complete)
            except UnreadableLogError as error:
                if error.partition == subject.name.partition:
                    raise
                self._failed(error.partition, error)
                family = [each for each in family if each.name.partition != error.partition]
                complete = False
            else:
                return

    async def _family(self, subject: Partition, shape: TopicShape, dirty_from: int) -> tuple[list[Partition], bool]:
        """Find the other partitions that may have records of its keys; whether all of them can be read."""
        topic, number = subject.name
        lineage = shape.lineage
        if lineage.current == lineage.first and len(shape.partitions) <= lineage.count:
            return [], True  # Never resized, or nothing is left of that.
        there = {
            other: each
            for each in self._replicas.of_topic(topic)
            if ((other := each.name.partition) - number) % lineage.initial == 0 and self._ready(topic, other) is each
        }
        ranges = {other: (each.log.log_start, each.log.end) for other, each in there.items()}
        found = await self._replicas.in_thread(partial(_find_family, number, dirty_from, ranges, lineage))
        related = {other for other in shape.partitions if (other - number) % lineage.initial == 0}
        return [there[other] for other in found], related <= there.keys()

    async def _clean(self, subject: Partition, family: Sequence[Partition], *, complete: bool) -> None:
        members = [subject, *family]
        if family:
            await _commit(members)
        if not self._are_ready(members):
            return
        points = await self._recovery_points(members)
        shape = self._shape_of(subject.name.topic)
        if shape is None or not self._are_ready(members):
            return
        cleaning = cleaner.plan(
            _member(subject, shape.lineage, points[0]),
            self._replicas.age.now_ms(),
            [_member(each, shape.lineage, point) for each, point in zip(family, points[1:], strict=True)],
            complete=complete,
        )
        cleaned = await self._replicas.in_cleaner(cleaning.run)
        if not self._are_ready(members):
            return  # A replica was stopped meanwhile; the checkpoint of its log must stay forgotten.
        self._postpone(members, {number for each in cleaned for number in each.postponed}, cleaning.now_ms)
        # The subject last: its mark says that the others are clean, too.
        by_number = {each.name.partition: each for each in members}
        for result in reversed(cleaned):
            partition = by_number[result.files.partition]
            with self._replicas.held(partition):
                if not self._are_ready([partition]) or not await self._finish(partition, result):
                    return
        self._runs.add()

    async def _recovery_points(self, members: Iterable[Partition]) -> list[int]:
        """Note the recovery points of logs durably; below them segments may be written anew."""
        logs = [each.log for each in members]
        points = [log.note_recovery_point() for log in logs if isinstance(log, LocalLog)]
        await self._replicas.save_checkpoints()
        return points

    async def _finish(self, partition: Partition, cleaned: Cleaned) -> bool:
        """Put the new segments of a log in place; False if the log was closed meanwhile, or cut."""
        log = partition.log
        assert isinstance(log, LocalLog)
        if cleaned.forgotten and not await partition.forget_aborted(cleaned.forgotten):
            return False
        if cleaned.groups:
            await partition.save_producers(log.high_watermark)
        steps, saved = finishing(log, cleaned), 0
        failed: OSError | None = None
        while self._are_ready([partition]):
            try:
                work = next(steps) if failed is None else steps.throw(failed)
            except StopIteration as done:
                saved = int(done.value)
                break
            try:
                failed = await self._replicas.in_cleaner(work)
            except OSError as error:
                failed = error
        else:
            return False
        self._saved.add(saved)
        if cleaned.groups:
            events.info("compacted", partition=partition.name, bytes_saved=saved)
        return True

    def _postpone(self, members: Iterable[Partition], numbers: Collection[int], now_ms: int) -> None:
        for each in members:
            if each.name.partition in numbers:
                assert isinstance(each.log, LocalLog)
                postpone_tombstones(each.log, now_ms)

    # -- folding back ------------------------------------------------------------------------------------------------

    async def _fold_back(self, retiring: Partition, shape: TopicShape | None) -> None:
        """Append what is left of a retiring partition to its survivor, then delete its records."""
        topic = retiring.name.topic
        if retiring.log.log_start == retiring.log.end:
            return
        while retiring.retiring and retiring.settings.log.compact and retiring.log.log_start < retiring.log.end:
            survivor = None
            if retiring.leadership is not None:
                survivor = self._ready(topic, retiring.leadership.survivor)
            if shape is None or survivor is None or not may_fold(retiring.leadership, survivor.leadership):
                return
            if not self._is_final(retiring):
                return
            family, complete = await self._family(retiring, shape, dirty_from=0)
            if not complete:
                return
            members = list(dict.fromkeys((retiring, survivor, *family)))
            await _commit(members)
            shape = self._shape_of(topic)
            if shape is None or not self._are_ready(members) or not self._is_final(retiring):
                return
            points = await self._recovery_points(members)
            shape = self._shape_of(topic)
            if shape is None or not self._are_ready(members) or not self._is_final(retiring):
                return
            now_ms = self._replicas.age.now_ms()
            files = [
                cleaner.files_of(_member(each, shape.lineage, point), now_ms)
                for each, point in zip(members, points, strict=True)
            ]
            fold = FoldBack(
                retiring, survivor, files, in_thread=self._replicas.in_thread, now_ms=self._replicas.time.now_ms
            )
            start = retiring.log.log_start
            postponed = await fold.append()
            self._folded.add(fold.appended)
            if postponed is None or not self._are_ready(members):
                return
            self._postpone(members, postponed, self._replicas.age.now_ms())
            await fold.delete()
            if retiring.log.log_start == start:
                return
        if retiring.retiring and retiring.settings.log.compact:
            self._emptied_partitions.add()
            events.info("folded back", partition=retiring.name)
            self._emptied(topic)

    def _is_final(self, retiring: Partition) -> bool:
        """Whether the log of a retiring partition will not change any more, and is old enough to be cleaned."""
        log = retiring.log
        assert isinstance(log, LocalLog)
        lag_ms, newest = log.config.min_compaction_lag_ms, log.segments.max_timestamp(log.log_start)
        old_enough = not lag_ms or newest is None or newest <= self._replicas.age.now_ms() - lag_ms
        return not retiring.table.transactions and old_enough

    # -- partitions --------------------------------------------------------------------------------------------------

    def _ready(self, topic: str, number: int) -> Partition | None:
        found = self._replicas.get(topic, number)
        if found is None or found.unavailable() is not ErrorCode.NONE or not isinstance(found.log, LocalLog):
            return None
        return found

    def _are_ready(self, partitions: Iterable[Partition]) -> bool:
        return all(self._ready(*each.name) is each for each in partitions)


async def _commit(partitions: Iterable[Partition]) -> None:
    """Make all records durable: a record goes only when a newer one is."""
    behind = [each.log.commit() for each in partitions if each.log.flushed < each.log.end]
    if behind:
        await asyncio.gather(*behind)


def _member(partition: Partition, lineage: Lineage, recovery_point: int) -> Member:
    assert isinstance(partition.log, LocalLog)
    cuts = lineage.cuts.get(partition.name.partition, NO_CUTS)
    return Member(
        partition.log,
        partition.name.partition,
        layout_ends=tuple(cuts.ends),
        layouts=(*cuts.layouts, lineage.current),
        stable=partition.last_stable_offset,
        aborted=partition.table.aborted,
        recovery_point=recovery_point,
    )


def _find_family(
    number: int, dirty_from: int, ranges: Mapping[int, tuple[int, int]], lineage: Lineage
) -> tuple[int, ...]:
    """Find the family of a partition; `ranges` has the log start and end of every partition that may be part of it."""
    start, end = ranges[number]
    dirty = _layouts(number, max(start, dirty_from), end, lineage)
    layouts_of = {other: _layouts(other, start, end, lineage) for other, (start, end) in ranges.items()}
    return family_of(number, dirty, layouts_of, lineage)


def _layouts(number: int, start: int, end: int, lineage: Lineage) -> list[int]:
    """The layouts of the segments with records from `start` to `end`, `end` exclusive."""
    return [
        segment.layout
        for segment in lineage.segments(number, start)
        if (end if segment.end is None else segment.end) > segment.start
    ]
