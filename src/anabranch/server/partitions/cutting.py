"""The cuts of partitions as their leaders know them: made once after a start, and extended by every resize.

Making those of a log that went through 1,000 layouts takes a millisecond, extending them a microsecond. So they are
made at the start (`held_layouts`), and later only extended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from anabranch.machines.controller.folding import HeldLayouts
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.cuts import behind, below, cuts_after
from anabranch.machines.lineage import Cuts
from anabranch.runtime.turns import in_turns
from anabranch.server.partitions.partition import KnownCuts, Partition

CUTS_AT_A_TIME = 500
"""Partitions that are looked at before other work has its turn."""


def cuts_of(partition: Partition | None, topic: Topic) -> Cuts | None:
    """The cuts of a partition for the published layouts of its topic, those below its log start left out.

    None while they are not known: its log cannot be opened, or its leader has not taken its role yet.
    """
    if partition is None or partition.offline_reason is not None or partition.topic_id != topic.topic_id:
        return None
    role, newest, known = partition.leadership, topic.newest, partition.cuts
    if role is None or role.layout < newest:
        return None
    if known.newest < newest:
        log, runs = partition.log, topic.ended.get(partition.name.partition, ())
        cuts = behind(known.cuts, log.log_start)
        done = cuts.ends[-1] if cuts.ends else log.log_start
        cuts = cuts_after(cuts, runs, newest, log.epochs.since(done), log.end)
        known = partition.cuts = KnownCuts(newest, cuts)
    return behind(below(known.cuts, newest), partition.log.log_start)


class CutsNow(Mapping[int, Cuts]):
    """The cuts of a topic's partitions, each looked up when it is asked for; partitions without any are left out.

    All are those of one topic node, also when a resize ends meanwhile: records of a later layout count as of the last
    one that the node knows, so that of two records neither is taken for newer than it is.
    """

    def __init__(self, topic: Topic, partition_of: Callable[[int], Partition | None]) -> None:
        self._topic = topic
        self._partition_of = partition_of

    def __getitem__(self, number: int) -> Cuts:
        cuts = cuts_of(self._partition_of(number), self._topic)
        if cuts is None or not cuts.ends:
            raise KeyError(number)
        return cuts

    def __iter__(self) -> Iterator[int]:
        return (number for number in self._topic.partitions if number in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


async def held_layouts(topic: Topic, partition_of: Callable[[int], Partition | None]) -> HeldLayouts | None:
    """The ended layouts of which a topic's logs hold records; None while the cuts of some partition are not known.

    Gives way to other work.
    """
    held: set[int] = set()
    known = True
    async for number in in_turns(topic.partitions, CUTS_AT_A_TIME):
        cuts = cuts_of(partition_of(number), topic)
        if cuts is None:
            known = False
            continue
        held.update(cuts.layouts)
    if not known:
        return None
    return HeldLayouts(topic.topic_id, topic.newest, frozenset(held), frozenset(topic.partitions))
