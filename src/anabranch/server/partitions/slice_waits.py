"""Fetches that wait for slices: of those of one group in one partition, a change wakes the first, which wakes the next.

A record that is appended is one slice: to wake all members for it would cost as many looks at the partition as there
are members. The rule: whoever looks at a partition and leaves something there wakes another one; and so does whoever
was woken and does not come to look, as its request was cancelled or is refused. Changes are numbered, and a fetch that
began its look after a change is not woken for it: a chain ends when all have looked.

A look may take turns of the loop: a fetch that begins to wait is woken at once for what has changed since it began. Of
a partition that no fetch waited for no change is numbered: there, whoever looked compares where its records end.

Nobody depends on being woken: a waiting fetch looks by itself from time to time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from anabranch.server.partitions.partition import Partition


class Waiter:
    """A fetch that waits; its future is done when it is to look again."""

    __slots__ = ("_done", "began", "has_ended", "member_id", "partitions")

    def __init__(self, member_id: str, partitions: Iterable[Partition], began: int, done: asyncio.Future[None]) -> None:
        """`began`: the number of the last change when it began its last look."""
        self.member_id = member_id
        self.partitions = tuple(dict.fromkeys(partitions))
        self.began = began
        self.has_ended = False
        """Whether to answer without another look: the member has ended its session."""
        self._done = done

    def wake(self) -> bool:
        """Have it look again; False if it is about to do so, or is gone."""
        if self._done.done():
            return False
        self._done.set_result(None)
        return True


class _Queue:
    """The waiting fetches of one group in one partition, those that wait for the longest time first."""

    __slots__ = ("_waits", "change", "waiters")

    def __init__(self, waits: SliceWaits) -> None:
        self._waits = waits
        self.waiters: dict[Waiter, None] = {}
        self.change = 0
        """The number of the last change."""

    def changed(self) -> None:
        self.change = self._waits.next_change()
        self.wake_next()

    def wake_next(self) -> None:
        """Wake one that has not looked since the last change."""
        for waiter in self.waiters:
            if waiter.began < self.change and waiter.wake():
                return


class SliceWaits:
    """The waiting fetches of all groups."""

    def __init__(self) -> None:
        self.changes = 0
        """The number of the last change of any partition that is waited for."""
        self._queues: dict[str, dict[Partition, _Queue]] = {}

    def next_change(self) -> int:
        """The number of a change that happens now."""
        self.changes += 1
        return self.changes

    def park(self, group_id: str, waiter: Waiter) -> None:
        """Have a fetch wait, until `leave`; woken at once if something has changed since its last look began."""
        queues = self._queues.setdefault(group_id, {})
        for partition in waiter.partitions:
            queue = queues.get(partition)
            if queue is None:
                queue = queues[partition] = _Queue(self)
                partition.watch(queue.changed)
            queue.waiters[waiter] = None
            if waiter.began < queue.change:
                waiter.wake()

    def leave(self, group_id: str, waiter: Waiter) -> None:
        """Forget a fetch that waits no more."""
        queues = self._queues[group_id]
        for partition in waiter.partitions:
            queue = queues[partition]
            del queue.waiters[waiter]
            if not queue.waiters:
                del queues[partition]
                partition.unwatch(queue.changed)
        if not queues:
            del self._queues[group_id]

    def changed(self, group_id: str, partition: Partition) -> None:
        """Have a fetch look: something became free, or was left by another one."""
        queue = self._queues.get(group_id, {}).get(partition)
        if queue is not None:
            queue.changed()

    def pass_on(self, group_id: str, partitions: Iterable[Partition]) -> None:
        """Have the next fetches look at partitions, in place of one that has not, or has taken nothing."""
        queues = self._queues.get(group_id, {})
        for partition in partitions:
            if partition in queues:
                queues[partition].wake_next()

    def freed(self, group_id: str) -> None:
        """Have a fetch look at each partition of a group: a member has left."""
        for queue in list(self._queues.get(group_id, {}).values()):
            queue.changed()

    def end(self, group_id: str, member_id: str, partition: Partition) -> None:
        """Have the waiting fetches of a member answered: it claims no more of a partition."""
        queue = self._queues.get(group_id, {}).get(partition)
        for waiter in () if queue is None else queue.waiters:
            if waiter.member_id == member_id:
                waiter.has_ended = True
                waiter.wake()
