"""The cuts of one partition: where its segments of ended layouts end, those that hold records (ordering.md, 6.3).

A leader derives them from two things that it has anyway: the leader epochs of its log, which have an entry only where
records are, and the runs of epochs that ended with each layout (`controller.layouts`). So they cost what is in the log,
and not what has happened to the topic. Cuts never change; resizes add some, and the log start passes some.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from anabranch.base.errors import DecodeError
from anabranch.machines.controller.layouts import Runs

LAYOUT_CODE, END_CODE = "i", "q"
CUT_SIZE = array(LAYOUT_CODE).itemsize + array(END_CODE).itemsize


@dataclass(frozen=True, slots=True)
class Cuts:
    """Ascending layouts, and the offset at which the partition's records of each end, exclusive; never changed."""

    layouts: array[int] = field(default_factory=lambda: array(LAYOUT_CODE))
    ends: array[int] = field(default_factory=lambda: array(END_CODE))

    def __len__(self) -> int:
        return len(self.ends)

    def behind(self, log_start: int) -> Cuts:
        """The cuts of segments that the log still holds records of."""
        gone = bisect_right(self.ends, log_start)
        return Cuts(self.layouts[gone:], self.ends[gone:]) if gone else self

    def below(self, layout: int) -> Cuts:
        """The cuts of the layouts below number `layout`."""
        left = bisect_right(self.layouts, layout - 1)
        return Cuts(self.layouts[:left], self.ends[:left]) if left < len(self.ends) else self

    def since(self, layout: int) -> Cuts:
        """The cuts of the layouts from number `layout` on."""
        first = bisect_right(self.layouts, layout - 1)
        return Cuts(self.layouts[first:], self.ends[first:]) if first else self

    def then(self, later: Cuts) -> Cuts:
        """These cuts and `later` ones."""
        return Cuts(self.layouts + later.layouts, self.ends + later.ends) if later.ends else self

    def encode(self) -> tuple[bytes, bytes]:
        """Write layouts and ends as big-endian 32 and 64 bit numbers."""
        return _swapped(self.layouts), _swapped(self.ends)


def decode_cuts(layouts: bytes | memoryview, ends: bytes | memoryview) -> Cuts:
    """Read the form of `Cuts.encode`; DecodeError where it is not ascending cuts."""
    found = Cuts()
    try:
        found.layouts.frombytes(layouts)
        found.ends.frombytes(ends)
    except ValueError as error:
        raise DecodeError(f"cuts of {len(layouts)} and {len(ends)} bytes: not whole numbers") from error
    if sys.byteorder == "little":
        found.layouts.byteswap()
        found.ends.byteswap()
    if len(found.layouts) != len(found.ends):
        raise DecodeError(f"cuts of {len(found.layouts)} layouts, but {len(found.ends)} ends")
    if not _ascending(found.layouts) or not _ascending(found.ends) or (found.ends and found.ends[0] < 0):
        raise DecodeError("cuts that do not ascend")
    return found


def cuts_after(known: Cuts, runs: Runs, newest: int, epochs: Iterable[tuple[int, int]], log_end: int) -> Cuts:
    """Add to `known` the cuts of the layouts that ended since, up to `newest`, which rules.

    `epochs`: (leader epoch, start offset) of the log's epochs that have records behind the last known cut, oldest
    first. An epoch above all that have ended belongs to the layout that rules.
    """
    layouts, ends = array(LAYOUT_CODE), array(END_CODE)
    done = known.ends[-1] if known.ends else -1
    at = 0
    pending = [*epochs]
    for (epoch, start), end in zip(pending, [*(start for _, start in pending[1:]), log_end], strict=True):
        while at < len(runs) and runs[at].epoch + runs[at].length <= epoch:
            at += 1
        if at == len(runs):
            break
        layout = runs[at].layout + max(epoch - runs[at].epoch, 0)
        if layout >= newest:
            break
        if end <= max(done, start):
            continue
        if layouts and layouts[-1] == layout:
            ends[-1] = end
        else:
            layouts.append(layout)
            ends.append(end)
    return known.then(Cuts(layouts, ends))


def _ascending(numbers: array[int]) -> bool:
    return all(map(int.__lt__, numbers, numbers[1:]))


def _swapped(numbers: array[int]) -> bytes:
    if sys.byteorder == "little":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()
