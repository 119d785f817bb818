"""The content of a coordinator's log: the last value of every key, and the pending records of open transactions.

A log is read as if it had just been compacted. So the result is the same before, during and after a compaction, and
overwritten records cost next to nothing. A value written in a transaction counts from its commit on, unless the key
was written again in between: the later record wins, which is also the one that compaction keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.records.batch import LENGTH_END, check, headers, parse_end_transaction_marker
from anabranch.records.key_values import decode_pairs
from anabranch.runtime.mapped import read_in
from anabranch.storage.interface import Slice

WINDOW_SIZE = 1 << 18
"""Bytes of a log that are read before others get their turn."""
BULK_FROM_SIZE = 4 << 20
"""Bytes of a log from which on `bulk_replay` pays, which needs NumPy."""


class Held(NamedTuple):
    """A record of an open transaction."""

    offset: int
    producer_id: int
    key: bytes
    value: bytes | None


class Replay:
    """A fold over the batches of a log, in order."""

    def __init__(self) -> None:
        self.latest: dict[bytes, bytes] = {}
        """The last value of every key that has one, in the order in which they were written."""
        self.undecided: dict[int, dict[bytes, tuple[int, bytes | None]]] = {}
        """By producer id, the offset and value of each key in its open transaction."""
        self.records = 0

    def scan(self, slices: Sequence[Slice]) -> Iterator[None]:
        """Fold all batches, a window at a time. OSError; DecodeError where one is malformed or has a wrong checksum."""
        for piece in slices:
            view, position = piece.view(), 0
            while position < len(view):
                length = read_in(view[position + 8 : position + LENGTH_END])
                size = int.from_bytes(length, signed=True) + LENGTH_END
                position += self._fold(bytes(read_in(view[position : position + max(WINDOW_SIZE, size)])))
                yield

    def _fold(self, window: bytes) -> int:
        """Fold the whole batches at the begin of some bytes; answers where they end."""
        end = 0
        for position, header in headers(window):
            check(window, position, header)
            end = position + header.size
            self.records += header.record_count
            batch = memoryview(window)[position:end]
            if header.is_control:
                marker = parse_end_transaction_marker(batch)
                if marker is not None:
                    self.end(marker.producer_id, committed=marker.commit)
                continue
            pairs = decode_pairs(batch, header)
            if header.is_transactional:
                held = self.undecided.setdefault(header.producer_id, {})
                for delta, (key, value) in enumerate(pairs):
                    if key is not None:
                        held[key] = header.base_offset + delta, value
            else:
                for key, value in pairs:
                    if key is not None:
                        self.put(key, value)
        if not end:
            raise DecodeError("a log ends within a record batch")
        return end

    def held(self) -> list[Held]:
        """Return the records of open transactions, in log order."""
        return sorted(
            Held(offset, producer_id, key, value)
            for producer_id, held in self.undecided.items()
            for key, (offset, value) in held.items()
        )

    def put(self, key: bytes, value: bytes | None) -> None:
        """A record of no transaction."""
        self.latest.pop(key, None)
        if value is not None:
            self.latest[key] = value
        for held in self.undecided.values():
            held.pop(key, None)

    def end(self, producer_id: int, *, committed: bool) -> None:
        """The end of a producer's transaction."""
        held = self.undecided.pop(producer_id, {})
        if not committed:
            return
        for key, (offset, value) in held.items():
            self.latest.pop(key, None)
            if value is not None:
                self.latest[key] = value
            for other in self.undecided.values():
                if key in other and other[key][0] < offset:
                    del other[key]
