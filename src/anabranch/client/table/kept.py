"""One table beside its consumer: the pure machine, its loads, and the marks of changes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.consumer.record import Record
from anabranch.client.consumer.state import current_record
from anabranch.client.settings import ConsumerSettings
from anabranch.client.table.changelog import Changelog, is_final
from anabranch.machines.clients.fetching import Deliverable
from anabranch.machines.clients.table import Load, Table, Write
from anabranch.machines.keyspace import Interval
from anabranch.machines.lineage import Lineage

LOADS_MAX = 4
"""Loads that run at a time."""
FLUSH_INTERVAL_MS = 50
"""The least time between commits that a load waits for."""
RETRY_S = 0.5
RETRIES_MAX = 60

Run = Callable[[Coroutine[Any, Any, None]], None]
_log = logging.getLogger("anabranch.client")


class Kept:
    """A table with its changelog. `get`, `put` and `items` may be called from any thread."""

    def __init__(
        self,
        driver: FetchingDriver,
        settings: ConsumerSettings,
        group: str | None,
        changelog: str,
        source: str,
        *,
        unflushed_size_max: int,
    ) -> None:
        self.changelog = changelog
        self.source = source
        self.machine = Table()
        self.lock = threading.Lock()
        """Held for every use of the machine: handlers may run in threads."""
        self._driver = driver
        self._settings = settings
        self._group = group
        self._unflushed_size_max = unflushed_size_max
        self._topic: Changelog | None = None
        self._loading = asyncio.Semaphore(LOADS_MAX)
        self._sweeping = False
        self._left_size = 0
        """The bytes of changes that the last commit could not take along."""
        self._flushed_ms = 0
        self._in_memory: set[TopicPartition] = set()
        """The partitions that have all entries in memory."""
        self._shares: dict[TopicPartition, Sequence[Interval]] = {}
        self._lineage: Lineage | None = None

    # -- before records are handed out --------------------------------------------------------------------------------

    def prepare(
        self, parts: Sequence[Deliverable], processed: Mapping[TopicPartition, int], run: Run
    ) -> set[TopicPartition]:
        """Return the partitions whose records cannot be handed out yet; begin what they wait for."""
        fetcher = self._driver.fetcher
        view = fetcher.view(self.source)
        ours = {TopicPartition(part.topic, part.partition) for part in parts if part.topic == self.source}
        if view is None:
            return ours
        lineage = view.lineage
        if self._topic is None:
            self._topic = Changelog(self.changelog, self.source, lineage.initial, self._settings, self._group)
        if self._topic.initial != lineage.initial:
            text = f"topic {self.source} was created with {self._topic.initial} partitions, now it is {lineage.initial}"
            raise ApiError(ErrorCode.INVALID_PARTITIONS, f"{text}: keys moved without order; build the table anew")
        with self.lock:
            machine = self.machine
            self._in_memory -= machine.advance(lineage, processed)
            if lineage is not self._lineage:
                self._lineage = lineage
                self._in_memory.clear()
            refused = ours if machine.unflushed_size > self._unflushed_size_max else set()
            for tp in fetcher.assignment:
                share = fetcher.share_of(tp)
                if tp.topic != self.source or (tp in self._in_memory and self._shares.get(tp) == share):
                    continue
                self._in_memory.discard(tp)
                self._shares[tp] = share
                machine.keep_to(tp, share)
                position = fetcher.open_at(tp)
                # Also where there is no record: the entries may be asked for.
                if position is not None and machine.admit(
                    lineage, tp, position, position + 1, share, fetcher.floor_of(tp)
                ):
                    self._in_memory.add(tp)
            for part in parts:
                tp = TopicPartition(part.topic, part.partition)
                if tp not in ours or tp in refused:
                    continue
                share, floor = fetcher.share_of(tp), fetcher.floor_of(tp)
                if not machine.admit(lineage, tp, part.start, part.end, share, floor):
                    refused.add(tp)
            for load in machine.take_loads():
                run(self._load(load))
            if not self._sweeping and machine.sweep():
                self._sweeping = True
                run(self._sweep())
        return refused

    async def _sweep(self) -> None:
        try:
            while True:
                with self.lock:
                    if not self.machine.sweep():
                        return
                await asyncio.sleep(0)
        finally:
            self._sweeping = False

    async def _load(self, load: Load) -> None:
        assert self._topic is not None
        done = False
        try:
            async with self._loading:
                for attempt in range(RETRIES_MAX):
                    try:
                        await self._topic.check()
                        await self._read(self._topic, load)
                        done = True
                        return
                    except (AnabranchError, OSError) as error:
                        if is_final(error) or attempt == RETRIES_MAX - 1:
                            error.add_note(f"while keys {load.piece.interval} of {self.changelog} were loaded")
                            raise
                        _log.warning("%s could not be loaded, and is tried again: %s", self.changelog, error)
                    await asyncio.sleep(RETRY_S)
        finally:
            with self.lock:
                if done:
                    self.machine.loaded(load)
                else:
                    self.machine.failed(load)

    async def _read(self, topic: Changelog, load: Load) -> None:
        with self.lock:
            self.machine.restart(load)
        async for entries in topic.read(load.family, load.piece.interval, lambda: self.machine.wants(load)):
            with self.lock:
                if not self.machine.fill(load, entries):
                    return

    # -- entries ------------------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        """Return the value of an owned key."""
        with self.lock:
            return self.machine.get(key)

    def put(self, key: bytes, value: bytes | None, record: Record | None) -> None:
        """Change the value of an owned key; the change is flushed with the record that it belongs to."""
        with self.lock:
            tp = self.machine.holder(key).partition
            self.machine.put(key, value, self._mark(tp, key, record))

    def _mark(self, tp: TopicPartition, key: bytes, record: Record | None) -> int:
        unfinished = self._driver.unfinished
        if unfinished is None:
            offset = self._driver.handout.consumed_of(tp)
            if offset is None:
                raise ApiError(ErrorCode.INVALID_REQUEST, f"{tp} has no position: no record of it was handed out")
            return offset
        record = record or current_record.get()
        if record is None:
            text = "with acknowledgements, name the record that a change belongs to: put(key, value, record)"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        if record.key != key:
            text = f"a record with key {record.key!r} cannot change the entry of key {key!r}"
            raise ApiError(ErrorCode.INVALID_REQUEST, f"{text}: records of that key may be worked on at the same time")
        if not unfinished.tracker.is_running(record.lease, record.delivery_count):
            text = f"the record at offset {record.offset} of {tp} does not count any more: it was finished, or revoked"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        return record.offset + 1

    def undo(self, record: Record) -> None:
        """Undo the change of a record that is not finished."""
        if record.key is not None and record.topic == self.source:
            with self.lock:
                self.machine.undo(TopicPartition(record.topic, record.partition), record.key, record.offset + 1)

    def release(self, partitions: Collection[TopicPartition]) -> None:
        """Drop partitions that were revoked or lost."""
        self._in_memory.difference_update(partitions)
        with self.lock:
            self.machine.release(tp for tp in partitions if tp.topic == self.source)
        for tp in partitions:
            self._shares.pop(tp, None)

    def part(self, tp: TopicPartition, ranges: Sequence[Interval]) -> None:
        """Drop ranges of a partition's keys that were revoked."""
        if tp.topic == self.source:
            self._in_memory.discard(tp)
            with self.lock:
                self.machine.part(tp, ranges)

    @property
    def is_ready(self) -> bool:
        """Whether the entries of all assigned partitions are in memory, also of ranges that were just granted."""
        fetcher = self._driver.fetcher
        ours = {tp for tp in fetcher.assignment if tp.topic == self.source}
        return (
            bool(ours)
            and ours <= self._in_memory
            and all(self._shares.get(tp) == fetcher.share_of(tp) and not fetcher.arriving(tp) for tp in ours)
        )

    # -- flushes ------------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the table waits for a commit."""
        if self.machine.flush_wanted:
            return self._driver.now_ms() >= self._flushed_ms + FLUSH_INTERVAL_MS
        return self.machine.unflushed_size - self._left_size > self._unflushed_size_max // 2

    def unflushed(self) -> set[TopicPartition]:
        """Return the partitions with changes that are not flushed."""
        with self.lock:
            return self.machine.unflushed()

    def writes(self, offsets: Mapping[TopicPartition, int | Sequence[tuple[int, int, int]]]) -> Iterator[list[Write]]:
        """Yield the changes that a commit of these offsets takes along."""
        ours = {tp: offset for tp, offset in offsets.items() if tp.topic == self.source}
        slices = self.machine.writes(ours)
        while True:
            with self.lock:
                writes = next(slices, None)
            if writes is None:
                return
            yield writes

    async def flushed(self) -> None:
        """Note that what was written is durable, together with the offsets."""
        slices = iter(self.machine.flushed())
        while True:
            with self.lock:
                if next(slices, self) is self:
                    self._left_size = self.machine.unflushed_size
                    self._flushed_ms = self._driver.now_ms()
                    return
            await asyncio.sleep(0)

    def not_flushed(self) -> None:
        """Note that nothing of it counts."""
        with self.lock:
            self.machine.not_flushed()
