"""The layouts of a topic as its node keeps them: their counts, and the leader epochs that ended with each.

Every resize ends one leader epoch on every partition that exists, so that a partition's epochs grow by one from layout
to layout, but for the few that a start after a crash skipped. They are kept as runs: the node, and whatever reads it,
grows with the partitions and not with partitions times layouts (ADR 0032). Layouts keep their numbers for ever; one in
which no log holds a record any more is folded away, and its number is not used again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Layout:
    """One partition count that ruled a topic, or rules it."""

    number: int
    count: int


class EpochRun(NamedTuple):
    """`length` layouts from `layout` on, with which the leader epochs from `epoch` on ended, one with each."""

    layout: int
    epoch: int
    length: int

    @property
    def last_epoch(self) -> int:
        """The epoch that ended with the last layout of the run."""
        return self.epoch + self.length - 1

    @property
    def last_layout(self) -> int:
        """The number of the last layout of the run."""
        return self.layout + self.length - 1


Runs = tuple[EpochRun, ...]
"""The runs of one partition, oldest first: layouts and epochs both grow from run to run."""
EndedEpochs = Mapping[int, Runs]
"""By partition, for those that exist."""


def with_ended(ended: EndedEpochs, layout: int, epochs: Mapping[int, int]) -> EndedEpochs:
    """Add the epochs, by partition, that end with `layout`: a layout not below any that a partition has ended."""
    added = dict(ended)
    for partition, epoch in epochs.items():
        runs = added.get(partition, ())
        if runs and runs[-1].last_layout >= layout:
            runs = below(runs, layout)
        if runs and (layout, epoch) == (runs[-1].last_layout + 1, runs[-1].last_epoch + 1):
            added[partition] = (*runs[:-1], runs[-1]._replace(length=runs[-1].length + 1))
        else:
            added[partition] = (*runs, EpochRun(layout, epoch, 1))
    return added


def below(runs: Runs, layout: int) -> Runs:
    """The part of `runs` for the layouts below number `layout`."""
    below = (run._replace(length=min(run.length, layout - run.layout)) for run in runs)
    return tuple(run for run in below if run.length > 0)


def ended_with(ended: EndedEpochs, layout: int) -> dict[int, int]:
    """The leader epoch that ended with `layout` on each partition that existed then and exists now."""
    found = ((partition, ended_epoch(runs, layout)) for partition, runs in ended.items())
    return {partition: epoch for partition, epoch in found if epoch is not None}


def ended_epoch(runs: Runs, layout: int) -> int | None:
    """The leader epoch of a partition that ended with `layout`; None where none did."""
    for run in reversed(runs):
        if run.layout <= layout:
            return run.epoch + layout - run.layout if layout <= run.last_layout else None
    return None


def layout_of_epoch(runs: Runs, epoch: int, newest: int) -> int:
    """The number of the layout that ruled when a partition's records of leader epoch `epoch` were appended.

    `newest`: the number of the layout that rules now; an epoch above all that have ended belongs to it.
    """
    at = bisect_left(runs, epoch, key=lambda run: run.last_epoch)
    if at == len(runs):
        return newest
    run = runs[at]
    return min(run.layout + max(epoch - run.epoch, 0), newest)


def kept(layouts: Sequence[Layout], held: Collection[int], newest: int) -> tuple[Layout, ...]:
    """The layouts that are left: those of which a log holds records, and those from number `newest` on."""
    return tuple(layout for layout in layouts if layout.number in held or layout.number >= newest)


def without(ended: EndedEpochs, layout: int) -> EndedEpochs:
    """The ended epochs without those of `layout`, the last that any partition has ended: it rules again."""
    left = {partition: below(runs, layout) for partition, runs in ended.items()}
    return {partition: runs for partition, runs in left.items() if runs}


def above(ended: EndedEpochs, first: int) -> EndedEpochs:
    """The ended epochs without those of layouts below number `first`."""
    left: dict[int, Runs] = {}
    for partition, runs in ended.items():
        later = tuple(_from(run, first) for run in runs if run.last_layout >= first)
        if later:
            left[partition] = later
    return left


def _from(run: EpochRun, first: int) -> EpochRun:
    skipped = max(first - run.layout, 0)
    return EpochRun(run.layout + skipped, run.epoch + skipped, run.length - skipped)
