"""The result of `replay` for large logs, computed by NumPy.

The log is read once, window by window, until all markers are known. Then the records of aborted and open transactions
are removed, and the rest counts in log order: an index takes the records that it can leave in place, and of the others
the last value of every key is kept. Compressed batches are not supported: see `UnsuitedError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.base.errors import DecodeError
from anabranch.records.batch import LENGTH_END, BatchHeader, parse_end_transaction_marker, parse_header
from anabranch.records.bulk_scan import Spans, Walked, spans, walk
from anabranch.records.compression import Compression
from anabranch.runtime.mapped import read_in
from anabranch.server.coordinators.replay import WINDOW_SIZE, Held
from anabranch.storage.interface import Slice


class Index(Protocol):
    """Takes records as they lie in the log."""

    def add(self, data: memoryview, spans: Spans) -> NDArray[np.bool_]:
        """Take some of the records of a window; return a mask of those taken."""

    def close(self) -> None:
        """All windows are added."""


class UnsuitedError(Exception):
    """The log holds something that only `Replay` can read."""


class _Rows(NamedTuple):
    """The records of one batch: the first, and behind the last."""

    window: int
    first: int
    behind: int


class _Window(NamedTuple):
    data: memoryview
    walked: Walked
    found: Spans

    def pair(self, row: int) -> tuple[bytes | None, bytes | None]:
        """The key and the value of a record."""
        found = self.found
        key_end, value_end = found.key_ends[row], found.value_ends[row]
        return (
            None if key_end < 0 else bytes(self.data[found.key_starts[row] : key_end]),
            None if value_end < 0 else bytes(self.data[found.value_starts[row] : value_end]),
        )

    def offsets(self) -> NDArray[np.int64]:
        """The offset of every record."""
        counts = self.walked.counts
        firsts = np.cumsum(counts) - counts
        return np.repeat(self.walked.base_offsets - firsts, counts) + np.arange(counts.sum())


class BulkReplay:
    """A fold over the batches of a log, in order."""

    def __init__(self, index: Index | None = None) -> None:
        self.latest: dict[bytes, bytes] = {}
        """The last value of every key that has one and that the index has not taken, in the order of the log."""
        self.records = 0
        self._index = index
        self._windows: list[_Window] = []
        self._open: dict[int, list[_Rows]] = {}
        """By producer id, the records of its open transaction."""
        self._void: list[_Rows] = []
        """Markers, and the records of aborted transactions."""
        self._held: dict[tuple[int, bytes], Held] = {}

    def scan(self, slices: Sequence[Slice]) -> Iterator[None]:
        """Fold all batches, a window at a time. OSError; DecodeError where one is malformed; UnsuitedError."""
        for piece in slices:
            view, position = piece.view(), 0
            while position < len(view):
                length = read_in(view[position + 8 : position + LENGTH_END])
                size = int.from_bytes(length, signed=True) + LENGTH_END
                data = read_in(view[position : position + max(WINDOW_SIZE, size)])
                walked = walk(data)
                if not walked.end:
                    raise DecodeError("a log ends within a record batch")
                special = [parse_header(data, start) for start in walked.starts[walked.special].tolist()]
                if any(header.compression is not Compression.NONE for header in special):
                    raise UnsuitedError
                window = _Window(data, walked, spans(data, walked))
                self._windows.append(window)
                self.records += len(window.found.key_ends)
                if special:
                    self._note(window, special)
                position += walked.end
                yield
        self._strike_out()
        for number, window in enumerate(self._windows):
            self._overtake(number, window)
            rest = window.found.key_ends >= 0
            if self._index is not None:
                rest &= ~self._index.add(window.data, window.found)
            self._fold(window, rest)
            yield
        if self._index is not None:
            self._index.close()
        self._windows = []

    def held(self) -> list[Held]:
        """Return the records of open transactions, in log order."""
        return sorted(self._held.values())

    def _note(self, window: _Window, special: Sequence[BatchHeader]) -> None:
        """Handle the markers of a window, and its batches of transactions."""
        behind = np.cumsum(window.walked.counts)
        for batch, header in zip(window.walked.special.tolist(), special, strict=True):
            rows = _Rows(len(self._windows) - 1, int(behind[batch]) - header.record_count, int(behind[batch]))
            if not header.is_control:
                self._open.setdefault(header.producer_id, []).append(rows)
                continue
            self._void.append(rows)
            start = int(window.walked.starts[batch])
            marker = parse_end_transaction_marker(window.data[start : start + header.size])
            if marker is not None:
                ended = self._open.pop(marker.producer_id, [])
                self._void += [] if marker.commit else ended

    def _strike_out(self) -> None:
        """Let only the records count that do, and hold back those of open transactions."""
        for producer_id, batches in self._open.items():
            for rows in batches:
                window = self._windows[rows.window]
                offsets = window.offsets()
                for row in range(rows.first, rows.behind):
                    key, value = window.pair(row)
                    if key is not None:
                        self._held[producer_id, key] = Held(int(offsets[row]), producer_id, key, value)
        for rows in [*self._void, *(rows for batches in self._open.values() for rows in batches)]:
            self._windows[rows.window].found.key_ends[rows.first : rows.behind] = -1

    def _overtake(self, number: int, window: _Window) -> None:
        """Drop the records of open transactions with keys that were written again later: they never count."""
        if not self._held or number < min(rows.window for batches in self._open.values() for rows in batches):
            return
        keys = {key for _, key in self._held}
        offsets = window.offsets()
        for row in np.flatnonzero(window.found.key_ends >= 0).tolist():
            key, _ = window.pair(row)
            if key in keys:
                gone = [it for it in self._held.values() if it.key == key and it.offset < offsets[row]]
                for held in gone:
                    del self._held[held.producer_id, held.key]

    def _fold(self, window: _Window, rows: NDArray[np.bool_]) -> None:
        """Keep the last values of some records."""
        if not rows.any():
            return
        latest, data = self.latest, bytes(window.data)
        for start, end, value_start, value_end in zip(*(column[rows].tolist() for column in window.found), strict=True):
            key = data[start:end]
            if key in latest:
                del latest[key]
            if value_end >= 0:
                latest[key] = data[value_start:value_end]
