"""Committed offsets left in a loaded log, indexed by group and read on demand.

Nothing is copied and nothing is decoded: the index holds a hash of each record's group and the places of its key and
value. Groups with equal hashes are separated when they are read; a second hash detects them. It
needs NumPy: import it where a log is large.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.base.errors import DecodeError
from anabranch.records.bulk_scan import Spans

KIND_MAX = 1
"""Keys of the kinds 0 and 1 are those of positions."""
GROUP_AT = 4
"""In a key: behind its kind and the size of the group's name."""
SIZE_MIN = GROUP_AT + 2 + 4
"""The size of a key without its group's name: the size of a topic name, and a partition."""
_MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
_CHECK_MULTIPLIER = np.uint64(0xD6E8_FEB8_6659_FD93)
_SHIFT = np.uint64(29)
_ALL = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

Hashes = NDArray[np.uint64]


class _Window(NamedTuple):
    data: memoryview
    key_starts: NDArray[np.int32]
    key_ends: NDArray[np.int32]
    value_starts: NDArray[np.int32]
    value_ends: NDArray[np.int32]

    def pair(self, row: int) -> tuple[bytes, bytes | None]:
        """The key and the value of a row."""
        end = self.value_ends[row]
        value = None if end < 0 else bytes(self.data[self.value_starts[row] : end])
        return bytes(self.data[self.key_starts[row] : self.key_ends[row]]), value


class Unread:
    """`add` all windows of the log, `close`, then look."""

    def __init__(self) -> None:
        self._windows: list[_Window] = []
        self._bounds: list[int] = []
        """The number of the first row of each window."""
        self._hashed: list[Hashes] = []
        self._checks: list[Hashes] = []
        self._collided = False
        """Whether groups are known that have a hash in common."""
        self._hashes: Hashes = np.empty(0, np.uint64)
        """Of all rows, ascending."""
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        """Their numbers, those of one hash in the order of the log."""
        self._taken: set[str] = set()
        self._next = 0

    def __len__(self) -> int:
        return len(self._rows)

    # -- loading -------------------------------------------------------------------------------------------------------

    def add(self, data: memoryview, spans: Spans) -> NDArray[np.bool_]:
        """Index the positions among some records and return a mask of them. DecodeError for a damaged key."""
        octets = np.frombuffer(data, np.uint8)
        starts, ends = spans.key_starts, spans.key_ends
        mine: NDArray[np.bool_] = ends - starts >= 2
        looked = np.flatnonzero(mine)
        mine[looked] = (octets[starts[looked]] == 0) & (octets[starts[looked] + 1] <= KIND_MAX)
        rows = np.flatnonzero(mine)
        if len(rows):
            starts, ends = starts[rows], ends[rows]
            if (ends - starts < SIZE_MIN).any():
                raise DecodeError("the key of a position that is cut off")
            sizes = octets[starts + 2].astype(np.int64) << 8 | octets[starts + 3]
            if (sizes > ends - starts - SIZE_MIN).any():
                raise DecodeError("the key of a position with a group's name that is cut off")
            self._bounds.append(sum(map(len, self._hashed[-1:])) + (self._bounds[-1] if self._bounds else 0))
            hashed, check = _hashes(data, starts + GROUP_AT, sizes)
            self._hashed.append(hashed)
            self._checks.append(check)
            columns = (starts, ends, spans.value_starts[rows], spans.value_ends[rows])
            self._windows.append(_Window(data, *(column.astype(np.int32) for column in columns)))
        return mine

    def close(self) -> None:
        """All windows are added."""
        if self._hashed:
            hashes = np.concatenate(self._hashed)
            self._rows = np.argsort(hashes, kind="stable")
            self._hashes = hashes[self._rows]
            checks = np.concatenate(self._checks)[self._rows]
            same = self._hashes[1:] == self._hashes[:-1]
            self._collided = bool((same & (checks[1:] != checks[:-1])).any())
            self._hashed, self._checks = [], []

    # -- looking -------------------------------------------------------------------------------------------------------

    def count(self, group_id: str) -> int:
        """About how many records `take` would return, those of the same key counted each; 0 when they were taken."""
        return 0 if group_id in self._taken else len(self._of(_hash_of(group_id.encode())))

    def take(self, group_id: str) -> dict[bytes, bytes | None]:
        """The last value of every key of a group: once, then never again."""
        if group_id in self._taken:
            return {}
        self._taken.add(group_id)
        name = group_id.encode()
        begin = len(name).to_bytes(2) + name
        found = (self._pair(row) for row in self._of(_hash_of(name)).tolist())
        return {key: value for key, value in found if key.startswith(begin, 2)}

    def names(self) -> set[str]:
        """The groups that were not taken."""
        return self._names(self._firsts())

    def doubtful(self) -> set[str]:
        """The groups that also have a tombstone in the log."""
        if not len(self._rows):
            return set()
        gone = np.concatenate([window.value_ends < 0 for window in self._windows])[self._rows]
        firsts = self._firsts()
        return self._names(firsts[np.logical_or.reduceat(gone, firsts)])

    def next_names(self) -> set[str]:
        """Some groups that were not taken, one if chance does not want it otherwise; none when all were."""
        while self._next < len(self._rows):
            rows = self._of(self._hashes[self._next])
            names = {self._name(row) for row in rows.tolist()} - self._taken
            if names:
                return names
            self._next += len(rows)
        return set()

    def _firsts(self) -> NDArray[np.int64]:
        """Where each hash begins."""
        different = self._hashes[1:] != self._hashes[:-1]
        return np.flatnonzero(np.append(len(self._rows) > 0, different))

    def _names(self, firsts: NDArray[np.int64]) -> set[str]:
        """The groups of the hashes that begin there."""
        if self._collided:
            found = {self._name(row) for first in firsts.tolist() for row in self._of(self._hashes[first]).tolist()}
        else:
            found = {self._name(row) for row in self._rows[firsts].tolist()}
        return found - self._taken

    def _name(self, row: int) -> str:
        key, _ = self._pair(row)
        return key[GROUP_AT : GROUP_AT + int.from_bytes(key[2:GROUP_AT])].decode()

    def _of(self, hashed: np.uint64) -> NDArray[np.int64]:
        begin, end = np.searchsorted(self._hashes, hashed, "left"), np.searchsorted(self._hashes, hashed, "right")
        return self._rows[begin:end]

    def _pair(self, row: int) -> tuple[bytes, bytes | None]:
        window = bisect_right(self._bounds, row) - 1
        return self._windows[window].pair(row - self._bounds[window])


def _hash_of(name: bytes) -> np.uint64:
    hashed: np.uint64 = _hashes(memoryview(name + bytes(8)), np.zeros(1, np.int64), np.array([len(name)]))[0][0]
    return hashed


def _hashes(data: memoryview, at: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[Hashes, Hashes]:
    """Hash the bytes at each position, in two ways; up to 8 more are read behind them."""
    words: Hashes = np.ndarray((len(data) - 7,), np.dtype("<u8"), data, 0, (1,))
    found: Hashes = sizes.astype(np.uint64) * _MULTIPLIER
    check: Hashes = sizes.astype(np.uint64)
    lanes, done = np.flatnonzero(sizes > 0), 0
    while len(lanes):
        left = sizes[lanes] - done
        masks = _ALL >> (np.maximum(8 - left, 0).astype(np.uint64) * np.uint64(8))
        word = words[at[lanes] + done] & masks
        mixed = (found[lanes] ^ word) * _MULTIPLIER
        found[lanes] = mixed ^ (mixed >> _SHIFT)
        check[lanes] = (check[lanes] + word) * _CHECK_MULTIPLIER
        done += 8
        lanes = lanes[left > 8]
    return found, check
