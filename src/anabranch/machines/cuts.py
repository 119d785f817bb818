"""The cuts of one partition: where its segments of ended layouts end, those that hold records (ordering.md, 6.3).

A leader derives them from two things that it has anyway: the leader epochs of its log, which have an entry only where
records are, and the runs of epochs that ended with each layout (`controller.layouts`). So they cost what is in the log,
and not what has happened to the topic. Cuts never change: resizes add some, and the log start passes some.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from anabranch.base.errors import DecodeError
from anabranch.codec.types import Blob
from anabranch.machines.controller.layouts import Layout, Runs
from anabranch.machines.lineage import Cuts, Lineage, Segment

CODE = "q"
FEW = 64
"""Numbers that are checked without NumPy, which takes a while to import."""
NO_CUTS = Cuts(array(CODE), array(CODE))


def behind(cuts: Cuts, log_start: int) -> Cuts:
    """The cuts of the segments that a log which starts at `log_start` still holds records of."""
    gone = bisect_right(cuts.ends, log_start)
    return Cuts(cuts.layouts[gone:], cuts.ends[gone:]) if gone else cuts


def below(cuts: Cuts, layout: int) -> Cuts:
    """The cuts of the layouts below number `layout`."""
    left = bisect_left(cuts.layouts, layout)
    return Cuts(cuts.layouts[:left], cuts.ends[:left]) if left < len(cuts.ends) else cuts


def since(cuts: Cuts, layout: int) -> Cuts:
    """The cuts of the layouts from number `layout` on."""
    first = bisect_left(cuts.layouts, layout)
    return Cuts(cuts.layouts[first:], cuts.ends[first:]) if first else cuts


def joined(earlier: Cuts, later: Cuts) -> Cuts:
    """The cuts of earlier layouts, then those of later ones; neither is changed."""
    if not earlier.ends or not later.ends:
        return later if later.ends else earlier
    return Cuts(_numbers(earlier.layouts) + _numbers(later.layouts), _numbers(earlier.ends) + _numbers(later.ends))


def cuts_after(known: Cuts, runs: Runs, newest: int, epochs: Iterable[tuple[int, int]], log_end: int) -> Cuts:
    """Add to `known` the cuts of the layouts that ended since, up to `newest`, which rules.

    `epochs`: (leader epoch, start offset) of the log's epochs that have records behind the last known cut, oldest
    first. An epoch above all that have ended belongs to the layout that rules.
    """
    layouts, ends = array(CODE), array(CODE)
    done = known.ends[-1] if known.ends else -1
    at = 0
    pending = [*epochs]
    for (epoch, start), end in zip(pending, [*(start for _, start in pending[1:]), log_end], strict=True):
        while at < len(runs) and runs[at].last_epoch < epoch:
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
    return joined(known, Cuts(layouts, ends))


def newest_segments(lineage: Lineage, partition: int, log_start: int, most: int) -> tuple[tuple[Segment, ...], int]:
    """The last `most` segments of a partition from `log_start` on, as `Lineage.segments`, and the count of all."""
    layouts, ends = behind(lineage.cuts.get(partition, NO_CUTS), log_start)
    newest = range(max(0, len(ends) + 1 - most), len(ends))
    ended = (Segment(partition, layouts[at], ends[at - 1] if at else log_start, ends[at]) for at in newest)
    growing = Segment(partition, lineage.current, ends[-1] if ends else log_start, None)
    return (*ended, growing), len(ends) + 1


def lineage_of(
    initial: int, layouts: Sequence[Layout], cuts: Mapping[int, Cuts], unknown: Mapping[int, int]
) -> Lineage:
    """The lineage of a topic, from the layouts that are left of it; the last one rules.

    A layout that was folded away has no record, and so no cut: it counts as the one before it.
    """
    first, counts = layouts[0].number, [layouts[0].count]
    for layout in layouts[1:]:
        counts += [counts[-1]] * (layout.number - first - len(counts))
        counts.append(layout.count)
    return Lineage(initial, tuple(counts), cuts, first, unknown)


def encode_cuts(cuts: Cuts) -> tuple[bytes, bytes]:
    """Write layouts and ends, each as big-endian numbers of 64 bits."""
    return _encoded(cuts.layouts), _encoded(cuts.ends)


def decode_cuts(layouts: Blob, ends: Blob) -> Cuts:
    """Read the form of `encode_cuts`; DecodeError where it is not ascending cuts."""
    numbers, offsets = _decoded(layouts), _decoded(ends)
    if len(numbers) != len(offsets):
        raise DecodeError(f"cuts of {len(numbers)} layouts have {len(offsets)} ends")
    if not _ascending(numbers) or not _ascending(offsets):
        raise DecodeError("cuts do not ascend")
    return Cuts(numbers, offsets)


def _encoded(numbers: Sequence[int]) -> bytes:
    copied = _numbers(numbers)[:]
    if sys.byteorder == "little":
        copied.byteswap()
    return copied.tobytes()


def _decoded(data: Blob) -> array[int]:
    numbers: array[int] = array(CODE)
    try:
        numbers.frombytes(data)
    except ValueError as error:
        raise DecodeError(f"{len(data)} bytes are no numbers of 64 bits") from error
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _ascending(numbers: array[int]) -> bool:
    if not numbers:
        return True
    if len(numbers) < FEW:
        return numbers[0] >= 0 and all(map(int.__lt__, numbers, numbers[1:]))
    import numpy as np

    column = np.frombuffer(numbers, np.int64)
    return bool(column[0] >= 0 and (column[1:] > column[:-1]).all())


def _numbers(numbers: Sequence[int]) -> array[int]:
    return cast("array[int]", numbers) if isinstance(numbers, array) else array(CODE, numbers)
