"""What the log of a coordinator says: the last value of every key, and what open transactions still hold back.

A log is read as if it had just been compacted, so that it means the same before, during and after a compaction, and
what was overwritten costs next to nothing. A value written in a transaction counts from its commit on, unless the key
was written again in between: the later record wins, which is also the one that compaction keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anabranch.records.batch import headers, parse_end_transaction_marker
from anabranch.records.pairs import decode_pairs
from anabranch.storage.log.segment import LogSlice


class Replay:
    """A fold over the batches of a log, in order."""

    def __init__(self) -> None:
        self.latest: dict[bytes, bytes] = {}
        """The last value of every key that has one, in the order in which they were written."""
        self.undecided: dict[int, dict[bytes, tuple[int, bytes | None]]] = {}
        """By producer, the offset and value of what his open transaction has written."""
        self.records = 0

    def scan(self, slices: Sequence[LogSlice], work: int) -> Iterator[None]:
        """Fold all batches; yields after about every `work` records. DecodeError where one is malformed."""
        due = work
        for piece in slices:
            view = piece.view()
            for position, header in headers(view):
                batch = view[position : position + header.size]
                if header.is_control:
                    marker = parse_end_transaction_marker(batch)
                    if marker is not None:
                        self.end(marker.producer_id, committed=marker.commit)
                    continue
                pairs = decode_pairs(batch, header)
                self.records += header.record_count
                if header.is_transactional:
                    held = self.undecided.setdefault(header.producer_id, {})
                    for delta, (key, value) in enumerate(pairs):
                        if key is not None:
                            held[key] = header.base_offset + delta, value
                else:
                    for key, value in pairs:
                        if key is not None:
                            self.put(key, value)
                if self.records >= due:
                    due = self.records + work
                    yield

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
