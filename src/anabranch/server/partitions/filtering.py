"""Fetches of a part of the records: blocks of the log are filtered in a thread, one pass for all who share a partition.

`machines.partition.sharing` decides whom a pass serves, and what is kept of it. Passes over one partition are made one
after the other: who waits for one mostly finds its records in what was kept. One pass reads at most BLOCK_SIZE_MAX
bytes of the log and expands records to a bounded size beyond that; there is one thread, so that is all the memory at
work. Small blocks of records that are not compressed are filtered in the event loop: a thread would take longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import thread_time
from uuid import UUID

from anabranch.base.errors import AnabranchError, DecodeError, ErrorCode
from anabranch.base.limits import EXPANDED_SIZE_MAX
from anabranch.codec.types import Pieces
from anabranch.machines.partition.sharing import (
    Asked,
    KeptPieces,
    Log,
    Piece,
    Sharers,
    Stretch,
    disjoint,
    selection_of,
)
from anabranch.records.batch import headers
from anabranch.records.compression import COMPRESSION_MASK
from anabranch.records.filtering import Gathered, Scatter, Scattered, Selection, Spread, in_one_piece
from anabranch.runtime.clock import Clock
from anabranch.runtime.mapped import read_in
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.partition import Partition
from anabranch.storage.interface import OffsetOutOfRangeError, Slice, fetched

BLOCK_SIZE = 512 * 1024
"""Bytes of the log that one pass filters where little is asked for."""
BLOCK_SIZE_MAX = 8 * 1024 * 1024
"""Bytes that one pass filters where more is asked for: what a pass costs beside the filtering is for all of them."""
LOOKED_AT_MAX = 16 * 1024 * 1024
"""Bytes of the log that are filtered for one answer; the reader goes on where it says that it ended."""
FULL_ENOUGH = 7, 8
"""The part of what there is room for that an answer is sent with: a pass for the rest would be small, and cut."""
INLINE_SIZE = 32 * 1024
"""Bytes of a block that the event loop filters itself, in less than 50 µs."""
BOOKS_MAX = 10_000
"""Partitions whose sharers are remembered."""

StretchOf = Callable[[Partition, int], Stretch | None]
"""Finds the layout that ruled at an offset of a partition; None while that is not known."""


class FilterRefusedError(AnabranchError):
    """A partition cannot be filtered now, for the reason that `code` names."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class FilteredSlice(Slice):
    """The records asked for, of all below `filtered_to`; in pieces, as they were found."""

    __slots__ = ("filtered_to", "log", "parts")

    def __init__(self, parts: Sequence[memoryview | Gathered], filtered_to: int, log: Log | None = None) -> None:
        """`log`: that they are of, as it was before they were read."""
        super().__init__(sum(map(len, parts)))
        self.log = log
        self.parts = parts
        self.filtered_to = filtered_to

    def view(self) -> memoryview:
        """Give the bytes, joined."""
        pieces = [in_one_piece(part) for part in self.parts]
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    @property
    def wire(self) -> Pieces:  # type: ignore[override]
        """The pieces."""
        return Pieces(self.parts)

    def next_offset(self) -> int:
        """Where the reader goes on."""
        return self.filtered_to


class _Book:
    """The sharers of one partition, and the lock under which its passes are made."""

    def __init__(self) -> None:
        self.sharers = Sharers()
        self.lock = asyncio.Lock()


class Filters:
    """The filtering of one broker."""

    def __init__(
        self,
        scatter_now: Callable[[], Scatter],
        stretch_of: StretchOf,
        clock: Clock,
        metrics: Metrics,
        *,
        work_size_max: int,
        kept_size_max: int,
    ) -> None:
        """`scatter_now` gives what scatters: plain Python until there is machine code."""
        self.kept = KeptPieces(kept_size_max)
        self._scatter_now = scatter_now
        self._stretch_of = stretch_of
        self._clock = clock
        self._work_size_max = work_size_max
        self._books: dict[Log, _Book] = {}
        self._thread = ThreadPoolExecutor(1, "filters")
        counter, gauge = metrics.counter, metrics.gauge
        self._passes = counter("anabranch_filter_passes_total", "Passes over blocks of logs for fetches.")
        self._read = counter("anabranch_filter_read_bytes_total", "Bytes of logs that were filtered.")
        self._found = counter("anabranch_filter_found_bytes_total", "Bytes that were found, for all readers.")
        self._cpu_s = counter("anabranch_filter_cpu_seconds_total", "Processor time of passes.")
        self._hits = counter("anabranch_filter_kept_answers_total", "Blocks that another's pass had filtered.")
        gauge("anabranch_filter_kept_bytes", "Bytes kept for readers that share partitions.", lambda: self.kept.size)
        gauge("anabranch_filter_kept_evictions", "Blocks kept and never sent.", lambda: self.kept.evictions)

    def close(self) -> None:
        """Give up the work that waits for the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def forget(self, topic_id: UUID, partitions: Collection[int]) -> None:
        """Drop what is known and kept of partitions that were removed."""
        self.kept.forget(topic_id, partitions)
        for log in [log for log in self._books if log.topic_id == topic_id and log.partition in partitions]:
            del self._books[log]

    def _keep(self, partition: Partition, log: Log, asked: Asked, piece: Piece) -> None:
        if partition.leadership is not None:  # Of one that was removed meanwhile nobody asks again.
            self.kept.keep(log, asked, piece)

    async def read(self, partition: Partition, asked: Asked, offset: int, limit: int, size_max: int) -> FilteredSlice:
        """Find what is asked for from `offset` on, below `limit`: about `size_max` bytes, or one batch if it is larger.

        OffsetOutOfRangeError, OfflineLogError, OSError, DecodeError, FilterRefusedError.
        """
        log, book = self._book_of(partition)
        book.sharers.began(asked, offset, self._clock.monotonic_ms())
        parts: list[memoryview | Gathered] = []
        at, size, looked_at = offset, 0, 0
        enough = size_max * FULL_ENOUGH[0] // FULL_ENOUGH[1]
        try:
            while at < limit and looked_at < LOOKED_AT_MAX and (size < enough or not size):
                async with book.lock:
                    piece = self.kept.take(log, asked, at)
                    if piece is None:
                        try:
                            piece, read_size = await self._pass(partition, book, log, asked, at, limit, size_max - size)
                        except DecodeError:
                            if at == offset:
                                raise
                            break  # What comes before the damage is sound; the next read meets it first.
                        looked_at += read_size
                    else:
                        _check_range(partition, at)
                        self._hits.add()
                if size and not isinstance(piece.data, memoryview) and len(piece.data) > size_max - size:
                    self._keep(partition, log, asked, piece)  # To be cut it would have to be copied.
                    break
                piece, rest = piece.part(at, limit, size_max - size)
                if rest is not None:
                    self._keep(partition, log, asked, rest)
                if size and size + len(piece.data) > size_max:
                    self._keep(partition, log, asked, piece)
                    break
                if len(piece.data):
                    parts.append(piece.data)
                size += len(piece.data)
                at = piece.end
                book.sharers.reached(asked, at)
        finally:
            book.sharers.ended(asked)
        return FilteredSlice(parts, at, log)

    def give_back(self, partition: Partition, asked: Asked, offset: int, found: FilteredSlice) -> None:
        """Keep what there was no room for in an answer, unless the log was cut since it was read."""
        log, _ = self._book_of(partition)
        if found.log == log:
            self._keep(partition, log, asked, Piece(offset, found.filtered_to, found.view()))

    def _book_of(self, partition: Partition) -> tuple[Log, _Book]:
        log = Log(partition.topic_id, partition.name.partition, partition.leader_epoch, partition.log_cuts)
        book = self._books.pop(log, None) or _Book()
        if partition.leadership is None:
            return log, book
        self._books[log] = book
        if len(self._books) > BOOKS_MAX:
            del self._books[next(iter(self._books))]
        return log, book

    async def _pass(
        self, partition: Partition, book: _Book, log: Log, asked: Asked, offset: int, limit: int, wanted: int
    ) -> tuple[Piece, int]:
        """Filter the next block of the log; the piece for `asked`, and the bytes that were looked at.

        `wanted`: bytes that there is room for in the answer.
        """
        stretch = self._stretch_of(partition, offset)
        if stretch is None:
            raise FilterRefusedError(ErrorCode.INVALID_PARTITION_METADATA)
        end = limit if stretch.end is None else min(limit, stretch.end)
        idle = partition.settings.keeps_others_records
        others = book.sharers.others(asked, offset, self._clock.monotonic_ms(), idle=idle)
        everyone = disjoint(asked, (each for each in others if self.kept.room_for(log, each)))
        likely = wanted * len(everyone) * 15 // 16  # A little less: what there is no room for must be cut off.
        block_size = max(BLOCK_SIZE, min(likely, BLOCK_SIZE_MAX))
        block = await fetched(partition.log.read(offset, block_size, end=end))
        if block is None:
            return Piece(offset, end, memoryview(b"")), 0
        spread = Spread(stretch.initial, stretch.held)
        scattered = await self._scatter(block, selection_of(everyone), spread)
        self._passes.add()
        self._read.add(scattered.size)
        for each, data in zip(everyone, scattered.data, strict=True):
            self._found.add(len(data))
            if each is not asked:
                self._keep(partition, log, each, Piece(offset, scattered.next_offset, _as_found(data)))
        return Piece(offset, scattered.next_offset, _as_found(scattered.data[0])), scattered.size

    async def _scatter(self, block: Slice, selection: Selection, spread: Spread) -> Scattered:
        scatter = partial(
            self._scatter_now(), record_size_max=EXPANDED_SIZE_MAX, work_size_max=self._work_size_max - BLOCK_SIZE_MAX
        )
        if block.size <= INLINE_SIZE:
            view = read_in(block.view())
            if not any(header.attributes & COMPRESSION_MASK for _, header in headers(view)):
                found, took_s = _timed(scatter, view, selection, spread)
                self._cpu_s.add(took_s)
                return found
        loop = asyncio.get_running_loop()
        work = partial(_timed, scatter)
        found, took_s = await loop.run_in_executor(self._thread, lambda: work(read_in(block.view()), selection, spread))
        self._cpu_s.add(took_s)
        return found


def _as_found(data: bytes | memoryview | Gathered) -> memoryview | Gathered:
    return memoryview(data) if isinstance(data, bytes) else data


def _timed(
    scatter: Callable[..., Scattered], view: memoryview, selection: Selection, spread: Spread
) -> tuple[Scattered, float]:
    """Scatter, and take the processor time of that in seconds."""
    began = thread_time()
    found = scatter(view, selection, spread)
    return found, thread_time() - began


def _check_range(partition: Partition, offset: int) -> None:
    """As a read of the log does, which what was kept has no need of."""
    log = partition.log
    if not log.log_start <= offset <= log.end:
        raise OffsetOutOfRangeError(f"Offset {offset} is not in {partition.name}, which has {log.log_start} on.")
