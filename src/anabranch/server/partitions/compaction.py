"""The upkeep of compacted topics: cleans dirty logs with their families, and folds retiring partitions back.

A round for each topic, pass by pass: finish segments that a resize has ended, or that have waited too long; find the
logs that are due; note recovery points, once for all of them; clean the logs; fold retiring partitions back
(`folding`), and delete what was folded, many logs at a time. Which are due, and in which order, is decided by
`machines.cleaning`, what may go by `machines.compaction`; the files are read and written by `storage.log.cleaner` in a
thread of its own, and replaced by `storage.log.replacing`. A log that cannot be read is left out of its family, and a
topic whose round fails does not end the rounds of others; both are logged and counted.

A topic may have 100,000 partitions, and a partition as many relatives. So no step looks at all of them, and a partition
looks only at its relatives (`machines.compaction.relatives`): a round costs what the topic's partitions and their
ancestors cost. What holds while others have their turn:

    ready           a partition that was lost does not come back: one that is there at the end was there all the time
    layouts         all logs of a cleaning are labelled by one topic node (`cutting.CutsNow`): a record that came under
                    a later layout counts as of that node's last one, and so as newer than nothing that it is newer than
    families        records that come after a log was looked at are of the newest layout: nothing becomes older
    recovery points those that were noted durably in this round, by partition; one that came since has none

Folding appends, so it wants more: the roles must not change from the search for the family to the last copy, and the
layout that they serve must be published, or records that are newer could not be told (`_append_to_survivor`).

Here one broker leads all partitions of a topic. In a fleet the other logs of a family are other leaders': their part of
the evidence, and what they remove, would be asked for through `server.cluster.peers.Peers`, keys in, places out; the
order of steps stays as it is, because each of them only relies on records that are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.cleaning import UNLIMITED_MS, Urgency, is_finished, rank
from anabranch.machines.compaction import family_of, may_fold, relatives
from anabranch.machines.lineage import NO_CUTS, Cuts, Lineage
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLogger
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.turns import in_turns
from anabranch.server.partitions.folding import FoldBack
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.upkeep_failures import UpkeepFailures
from anabranch.storage.log import cleaner
from anabranch.storage.log.cleaner import Cleaned, Member
from anabranch.storage.log.evidence import LogFiles, UnreadableLogError
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.marks import clean_to, postpone_tombstones
from anabranch.storage.log.replacing import Work, finishing, resuming

events = EventLogger("compaction")
LOGS_AT_A_TIME, SEGMENTS_AT_A_TIME = 32, 2_000
"""Logs that are looked at, and segments of theirs, before other work has its turn."""
COMMITTED_AT_A_TIME = 8
"""Logs whose segments are finished, which writes their indexes, and of which a sync is begun."""
NOTED_AT_A_TIME = 4
"""Logs whose recovery points are noted: that of one that was not noted yet writes a small file."""
LOOKED_UP_AT_A_TIME = 500
"""Partitions that are only looked up."""
CUTS_ON_THE_LOOP_MAX = 128
"""Segments of a partition and its relatives that are compared on the loop; a thread compares more."""
DELETED_AT_A_TIME = 256
"""Logs whose folded records are deleted together: their log starts are made durable together."""


class TopicShape(NamedTuple):
    """A topic as the cluster knows it."""

    lineage: Lineage
    partitions: Collection[int]
    """All that exist, 0 .. n-1 without a hole, whether or not their logs can be opened."""


class Compaction:
    """The compaction of all topics with `cleanup.policy=compact`."""

    def __init__(
        self,
        replicas: Replicas,
        shape_of: Callable[[str], TopicShape | None],
        metrics: Metrics,
        emptied: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """`shape_of` finds a topic, None without one; `emptied` is called for a topic with emptied partitions."""
        self._replicas = replicas
        self._shape_of = shape_of
        self._emptied = emptied
        count = metrics.counter
        self._runs = count("anabranch_compaction_runs_total", "Cleanings of logs of compacted topics.")
        self._saved = count("anabranch_compaction_bytes_saved_total", "Bytes removed by compaction.")
        self._failures: UpkeepFailures[TopicPartition | str] = UpkeepFailures(
            count("anabranch_compaction_failures_total", "Logs or topics that could not be compacted."),
            clock,
            events,
            on_failure="not compacted",
            on_success="compacted again",
        )
        self._failed: set[TopicPartition | str] = set()
        """What has failed in this round of a topic."""
        self._folded = count(
            "anabranch_compaction_folded_records_total", "Records of retiring partitions appended to their survivors."
        )
        self._emptied_partitions = count(
            "anabranch_compaction_emptied_partitions_total", "Retiring partitions that were folded back whole."
        )

    async def run(self) -> None:
        """Do one round for every compacted topic, that with the most urgent log first."""
        most: dict[str, tuple[bool, float, float]] = {}
        async for each in _in_turns(self._replicas):
            if each.settings.log.compact:
                topic, urgency = each.name.topic, None
                with contextlib.suppress(OSError):  # The topic's round says why.
                    urgency = self._urgency(each)
                most[topic] = min(most.get(topic, rank(None)), rank(urgency))
        topics: list[tuple[tuple[bool, float, float], str]] = []
        async for topic in in_turns(most, LOOKED_UP_AT_A_TIME):
            heappush(topics, (most[topic], topic))
        while topics:
            _, topic = heappop(topics)
            with self._noting_failures(topic):
                await self.run_topic(topic)
            self._note_success(topic)
            await asyncio.sleep(0)
        self._failures.forget(self._is_gone)

    def _is_gone(self, name: TopicPartition | str) -> bool:
        return not self._replicas.of_topic(name) if isinstance(name, str) else self._replicas.get(*name) is None

    async def run_topic(self, topic: str) -> None:
        """Do one round for a topic. A partition that fails does not end the round of the others."""
        self._failed.clear()
        partitions = self._replicas.of_topic(topic)
        await self._finish_segments(topic, partitions)
        due: list[tuple[tuple[bool, float, float], int]] = []
        behind: list[Partition] = []
        async for each in _in_turns(partitions):
            with self._noting_failures(each.name):
                urgency = self._urgency(each)
                if urgency is not None:
                    heappush(due, (rank(urgency), each.name.partition))
                    behind.append(each)
        await self._make_durable(topic, behind)
        if due:
            with self._noting_failures(topic):
                await self._clean_all(topic, due, await self._recovery_points(partitions))
        await self._fold_all(topic, partitions)

    @contextlib.contextmanager
    def _noting_failures(self, name: TopicPartition | str) -> Iterator[None]:
        """Note what fails of a partition or a topic, also a defect: it concerns no other."""
        try:
            yield
        except Exception as error:
            self._note_failure(name, error)

    def _note_failure(self, name: TopicPartition | str, error: Exception) -> None:
        self._failed.add(name)
        self._failures.failed(name, error)

    def _note_success(self, name: TopicPartition | str) -> None:
        """Note that a partition or a topic has had its round, unless a part of that has failed."""
        if name not in self._failed:
            self._failures.succeeded(name)

    def _urgency(self, partition: Partition) -> Urgency | None:
        """How urgent the cleaning of a log is, by what is synced. OSError."""
        log = partition.log
        if self._ready(*partition.name) is not partition or not isinstance(log, LocalLog):
            return None
        member = Member(log, stable=partition.last_stable_offset, recovery_point=log.recovery_point)
        return cleaner.urgency(member, self._replicas.age.now_ms())

    # -- segments ----------------------------------------------------------------------------------------------------

    async def _finish_segments(self, topic: str, partitions: Iterable[Partition]) -> None:
        """Finish the segments that a resize has ended, or that have waited too long, and make them durable."""
        shape = self._shape_of(topic)
        if shape is None:
            return
        finished: list[Partition] = []
        async for each in _in_turns(partitions):
            if self._ready(*each.name) is each and each.settings.log.compact:
                with self._noting_failures(each.name):
                    if self._finish_segment(each, shape):
                        finished.append(each)
            if len(finished) == COMMITTED_AT_A_TIME:
                await self._commit(finished)
                finished = []
        await self._commit(finished)

    def _finish_segment(self, partition: Partition, shape: TopicShape) -> bool:
        log, finished = partition.log, False
        assert isinstance(log, LocalLog)
        cuts = shape.lineage.cuts.get(partition.name.partition, NO_CUTS)
        if cuts.ends:  # Old records of keys that moved away need not wait for new ones to be cleaned.
            finished = log.finish_segment(cuts.ends[-1])
        rules = cleaner.rules_of(log)
        if rules.lag_max_ms < UNLIMITED_MS:
            now_ms = self._replicas.age.now_ms()
            if is_finished(cleaner.active_since_ms(log), rules, now_ms):
                finished = log.finish_segment(log.end) or finished
        return finished

    async def _make_durable(self, topic: str, partitions: Sequence[Partition]) -> None:
        """Make logs durable that are about to be cleaned with their families: what is not synced is not cleaned."""
        shape = self._shape_of(topic)
        if shape is None or not _was_resized(shape):
            return
        behind = [each async for each in in_turns(partitions, LOGS_AT_A_TIME) if each.log.flushed < each.log.end]
        for begin in range(0, len(behind), COMMITTED_AT_A_TIME):
            some = behind[begin : begin + COMMITTED_AT_A_TIME]
            await self._commit([each for each in some if self._are_ready([each])])

    async def _commit(self, partitions: Sequence[Partition]) -> None:
        commits = [each.log.commit() for each in partitions]
        for each, commit in zip(partitions, commits, strict=True):
            with self._noting_failures(each.name):
                await commit

    async def _recovery_points(self, partitions: Iterable[Partition]) -> Mapping[Partition, int]:
        """Note the recovery points of logs durably; below them segments may be written anew."""
        points: dict[Partition, int] = {}
        async for each in in_turns(partitions, NOTED_AT_A_TIME):
            log = each.log
            if self._ready(*each.name) is each and isinstance(log, LocalLog):
                with self._noting_failures(each.name):
                    points[each] = log.note_recovery_point()
        await self._replicas.save_checkpoints()
        return points

    # -- cleaning ----------------------------------------------------------------------------------------------------

    async def _clean_all(
        self, topic: str, due: list[tuple[tuple[bool, float, float], int]], points: Mapping[Partition, int]
    ) -> None:
        """Clean the logs that are due, taken from a heap."""
        while due:
            _, number = heappop(due)
            subject = self._ready(topic, number)
            if subject is not None:
                with self._noting_failures(subject.name):
                    await self._clean_if_due(subject, points)
                self._note_success(subject.name)
            await asyncio.sleep(0)

    async def _clean_if_due(self, subject: Partition, points: Mapping[Partition, int]) -> None:
        log, shape = subject.log, self._shape_of(subject.name.topic)
        assert isinstance(log, LocalLog)
        if shape is None or not subject.settings.log.compact or self._urgency(subject) is None:
            return
        family, complete = await self._family(subject, shape, dirty_from=clean_to(log))
        while True:
            try:
                await self._clean(subject, family, points, complete=complete)
            except UnreadableLogError as error:
                if error.partition == subject.name.partition:
                    raise
                self._note_failure(TopicPartition(subject.name.topic, error.partition), error)
                family = [each for each in family if each.name.partition != error.partition]
                complete = False
            else:
                return

    async def _family(self, subject: Partition, shape: TopicShape, dirty_from: int) -> tuple[list[Partition], bool]:
        """Find the other partitions that may have records of its keys; whether all of them can be read."""
        topic, number = subject.name
        lineage, complete = shape.lineage, True
        if not _was_resized(shape):
            return [], True
        there = {number: subject}
        async for other in in_turns(relatives(number, len(shape.partitions), lineage.initial), LOOKED_UP_AT_A_TIME):
            each = self._ready(topic, other)
            if each is not None:
                there[other] = each
            elif other in shape.partitions:
                complete = False
        ranges: dict[int, tuple[int, int]] = {}
        cuts: dict[int, Cuts] = {}
        async for other in in_turns(there, LOOKED_UP_AT_A_TIME):
            log = there[other].log
            if other == number or log.log_start < log.end:
                ranges[other], cuts[other] = (log.log_start, log.end), lineage.cuts.get(other, NO_CUTS)
        find = partial(_find_family, number, dirty_from, ranges, replace(lineage, cuts=cuts))
        much = len(cuts) + sum(len(it.ends) for it in cuts.values()) > CUTS_ON_THE_LOOP_MAX
        found = await self._replicas.in_thread(find) if much else find()
        return [there[other] for other in found], complete

    async def _clean(
        self, subject: Partition, family: Sequence[Partition], points: Mapping[Partition, int], *, complete: bool
    ) -> None:
        members = [subject, *family]
        if family:
            await _commit(members)
        shape, now_ms = self._shape_of(subject.name.topic), self._replicas.age.now_ms()
        files = None if shape is None else await self._files_of(members, shape, now_ms, points)
        if files is None or not await self._all_ready(members):
            return
        assert isinstance(subject.log, LocalLog)
        cleaning = cleaner.cleaning_of(subject.log, files, now_ms, complete=complete)
        cleaned = await self._replicas.in_cleaner(cleaning.run)
        if not await self._all_ready(members):
            return  # A replica was stopped meanwhile; the checkpoint of its log must stay forgotten.
        by_number = {each.name.partition: each for each in members}
        postponed = {number for each in cleaned for number in each.postponed}
        if await self._postpone([by_number[number] for number in postponed], now_ms):
            return
        # The subject last: its mark says that the others are clean, too.
        async for result in in_turns(reversed(cleaned), LOOKED_UP_AT_A_TIME):
            if result.changes_nothing:
                continue
            partition = by_number[result.files.partition]
            with self._replicas.held(partition):
                if not self._are_ready([partition]) or not await self._finish(partition, result):
                    return
        self._runs.add()

    async def _files_of(
        self, partitions: Sequence[Partition], shape: TopicShape, now_ms: int, points: Mapping[Partition, int]
    ) -> list[LogFiles] | None:
        """Note the files of logs, each as they are in some step; None if one was lost. OSError."""
        files: list[LogFiles] = []
        async for each in _in_turns(partitions):
            if self._ready(*each.name) is not each or not await self._resume(each):
                return None
            files.append(cleaner.files_of(_member(each, shape.lineage, points.get(each, 0)), now_ms))
        return files

    async def _finish(self, partition: Partition, cleaned: Cleaned) -> bool:
        """Put the new segments of a log in place; False if the log was closed meanwhile, or cut."""
        log = partition.log
        assert isinstance(log, LocalLog)
        if cleaned.forgotten and not await partition.forget_aborted(cleaned.forgotten):
            return False
        if cleaned.groups:
            await partition.save_producers(log.high_watermark)
        saved = await self._take(partition, finishing(log, cleaned))
        if saved is None:
            return False
        self._saved.add(saved)
        if cleaned.groups:
            events.info("compacted", partition=partition.name, bytes_saved=saved)
        return True

    async def _resume(self, partition: Partition) -> bool:
        """Finish what an error has interrupted in a log; False if the log was closed meanwhile, or cut. OSError."""
        assert isinstance(partition.log, LocalLog)
        with self._replicas.held(partition):
            return await self._take(partition, resuming(partition.log)) is not None

    async def _take(self, partition: Partition, steps: Generator[Work, None, int]) -> int | None:
        """Take steps that replace segments; the bytes saved, None if the log was closed meanwhile, or cut. OSError."""
        failed: OSError | None = None
        while self._are_ready([partition]):
            try:
                work = next(steps) if failed is None else steps.throw(failed)
            except StopIteration as done:
                return int(done.value)
            try:
                failed = await self._replicas.in_cleaner(work)
            except OSError as error:
                failed = error
        return None

    async def _postpone(self, partitions: Iterable[Partition], now_ms: int) -> set[int]:
        """Have the tombstones of logs stay for `delete.retention.ms` from now on; the logs of which that failed."""
        failed: set[int] = set()
        async for each in in_turns(partitions):
            if self._ready(*each.name) is each:
                assert isinstance(each.log, LocalLog)
                failed.add(each.name.partition)
                with self._noting_failures(each.name):
                    postpone_tombstones(each.log, now_ms)
                    failed.discard(each.name.partition)
        return failed

    # -- folding back ------------------------------------------------------------------------------------------------

    async def _fold_all(self, topic: str, partitions: Iterable[Partition]) -> None:
        """Append what is left of retiring partitions to their survivors, then delete their records."""
        appended: list[_Appended] = []
        async for each in in_turns(partitions, LOGS_AT_A_TIME):
            if not _is_to_fold(each) or self._ready(*each.name) is not each:
                continue
            with self._noting_failures(each.name):
                last = await self._fold_back(each)
                if last is not None:
                    appended.append(last)
            if len(appended) == DELETED_AT_A_TIME:
                await self._delete(topic, appended)
                appended = []
        await self._delete(topic, appended)

    async def _fold_back(self, retiring: Partition) -> _Appended | None:
        """Fold a log back, range by range: the last range, appended and not deleted yet; None if there is none."""
        while _is_to_fold(retiring):
            appended = await self._append_to_survivor(retiring)
            if appended is None or appended.fold.done_to == retiring.log.end:
                return appended
            start = retiring.log.log_start
            await self._delete(retiring.name.topic, [appended])
            if retiring.log.log_start == start:
                return None
        return None

    async def _append_to_survivor(self, retiring: Partition) -> _Appended | None:
        """Append a range of a retiring log to its survivor, durably; None if that is not possible now."""
        topic, role = retiring.name.topic, retiring.leadership
        shape = self._shape_of(topic)
        survivor = None if role is None else self._ready(topic, role.survivor)
        if shape is None or role is None or survivor is None:
            return None
        roles = role, survivor.leadership
        if not may_fold(*roles) or not self._is_final(retiring):
            return None
        family, complete = await self._family(retiring, shape, dirty_from=0)
        if not complete:
            return None
        others = [each for each in family if each is not survivor]
        members = [retiring, survivor, *others]
        await _commit(members)
        shape, now_ms = self._shape_of(topic), self._replicas.age.now_ms()
        # Nothing is written anew here, so that nobody needs to know what a recovery would check.
        files = None if shape is None else await self._files_of(others, shape, now_ms, {})
        if shape is None or files is None or not await self._all_ready(members):
            return None
        if not await self._resume(retiring) or not await self._resume(survivor):
            return None
        # From here to the fold nothing awaits: all that the survivor is given from now on is looked at.
        if not self._are_ready((retiring, survivor)) or (retiring.leadership, survivor.leadership) != roles:
            return None
        if role.layout != shape.lineage.current or not self._is_final(retiring):
            return None  # Until its layout is published what the survivor was given counts as of the layout before.
        own = [cleaner.files_of(_member(each, shape.lineage, 0), now_ms) for each in (retiring, survivor)]
        time, in_thread = self._replicas.time, self._replicas.in_thread
        fold = FoldBack(retiring, survivor, [*own, *files], in_thread=in_thread, now_ms=time.now_ms)
        done = await fold.append()
        self._folded.add(fold.appended)
        return _Appended(fold, members) if done else None

    async def _delete(self, topic: str, appended: Sequence[_Appended]) -> None:
        """Delete what was folded back; what is noted durably for that is noted for all together."""
        ready = [it for it in appended if await self._all_ready(it.members)]
        postponed = {each: None for it in ready for each in it.members if each.name.partition in it.fold.postponed}
        failed = await self._postpone(postponed, self._replicas.age.now_ms())
        ready = [it for it in ready if failed.isdisjoint(it.fold.postponed)]
        async for it in in_turns(ready, NOTED_AT_A_TIME):
            with self._noting_failures(it.fold.retiring.name):
                await it.fold.prepare_delete()
        emptied = 0
        with self._noting_failures(topic):
            if ready:
                await self._replicas.save_checkpoints()
            async for it in in_turns(ready, 1):
                with self._noting_failures(it.fold.retiring.name):
                    emptied += await self._delete_one(it.fold)
        if emptied:
            self._emptied(topic)

    async def _delete_one(self, fold: FoldBack) -> bool:
        """Delete what was folded back of one log; whether nothing is left of it."""
        retiring = fold.retiring
        await fold.delete()
        if not retiring.retiring or not retiring.settings.log.compact or retiring.log.log_start < retiring.log.end:
            return False
        self._emptied_partitions.add()
        events.info("folded back", partition=retiring.name)
        return True

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

    async def _all_ready(self, partitions: Iterable[Partition]) -> bool:
        """Whether all of them were ready when this was asked: one that was lost does not come back."""
        async for each in in_turns(partitions, LOOKED_UP_AT_A_TIME):
            if self._ready(*each.name) is not each:
                return False
        return True


class _Appended(NamedTuple):
    """A range of a log that was appended to its survivor; its records are still to be deleted."""

    fold: FoldBack
    members: Sequence[Partition]
    """The logs that were looked at."""


def _was_resized(shape: TopicShape) -> bool:
    """Whether a partition may have relatives; not if nothing is left of earlier layouts."""
    return shape.lineage.current > shape.lineage.first or len(shape.partitions) > shape.lineage.count


def _is_to_fold(partition: Partition) -> bool:
    log = partition.log
    return partition.retiring and partition.settings.log.compact and log.log_start < log.end


async def _in_turns(partitions: Iterable[Partition]) -> AsyncIterator[Partition]:
    """Yield partitions whose segments are looked at; other work has its turn after some."""
    segments = 0
    async for each in in_turns(partitions, LOGS_AT_A_TIME):
        if segments >= SEGMENTS_AT_A_TIME:
            segments = 0
            await asyncio.sleep(0)
        segments += len(each.log.segments) if isinstance(each.log, LocalLog) else 0
        yield each


async def _commit(partitions: Iterable[Partition]) -> None:
    """Make all records durable: a record goes only when a newer one is."""
    waiting = [
        each.log.commit() async for each in in_turns(partitions, LOGS_AT_A_TIME) if each.log.flushed < each.log.end
    ]
    for commit in waiting:
        await commit


def _member(partition: Partition, lineage: Lineage, recovery_point: int) -> Member:
    assert isinstance(partition.log, LocalLog)
    cuts = lineage.cuts.get(partition.name.partition, NO_CUTS)
    return Member(
        partition.log,
        partition.name.partition,
        layout_ends=tuple(cuts.ends),
        layouts=(*cuts.layouts, lineage.current),
        stable=partition.last_stable_offset,
        aborted=partition.table.aborted.copy(),  # Read in a thread, line by line.
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
