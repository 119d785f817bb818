"""Expiry: positions unused for `offsets.retention.minutes` are deleted, and empty groups without positions.

A round goes over all groups of a shard in steps, so that no step looks at more than about `POSITIONS_PER_STEP`
positions nor deletes more than `RECORDS_PER_STEP`; a group with more expired positions takes several steps. The rule:
what a step decides follows from the state at that step, so a round may be lost, as by a reload, at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import TypeAlias

from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.outcome import Draft, Outcome

POSITIONS_PER_STEP = 1_000
"""2 ms."""
RECORDS_PER_STEP = 100
"""Deciding, encoding and applying one takes 40 us."""
PAUSE_MS = 1
KEY = ("expire",)

Group: TypeAlias = ConsumerGroup | ClassicGroup


class Expiry:
    """The present round of one shard."""

    def __init__(
        self,
        groups: Mapping[str, Group],
        offsets: Offsets,
        *,
        read_topics: Callable[[Group | None], frozenset[str] | None],
        end: Callable[[Group | None, str, Draft[CoordinatorRecord], int], None],
        positions_gone: Callable[[str], None],
        began: Callable[[], Set[str]],
    ) -> None:
        """`end` removes an empty group; `positions_gone` is called with a group of which positions are deleted.

        `began`: the groups whose beginnings in topics are written down.
        """
        self._groups = groups
        self._offsets = offsets
        self._read_topics = read_topics
        self._end = end
        self._positions_gone = positions_gone
        self._began = began
        self._left: list[str] = []
        """The groups to be looked at in this round, the next one last."""

    def begin_later(self, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        """Begin a round after the check interval."""
        draft.set_timer(KEY, now_ms + self._offsets.settings.offsets_retention_check_interval_ms)

    def decide(self, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """Take one step: of a new round, or of the present one."""
        draft: Draft[CoordinatorRecord] = Draft()
        left, looked = self._left, 0
        if not left:
            left += self._offsets.positions.groups() | self._groups.keys() | self._began()
            left.sort(reverse=True)
        while left and looked < POSITIONS_PER_STEP and len(draft.records) < RECORDS_PER_STEP:
            looked += 1 + self._look_at(left[-1], draft, now_ms)
            if len(draft.records) < RECORDS_PER_STEP:
                left.pop()
        if left:
            draft.set_timer(KEY, now_ms + PAUSE_MS)
        else:
            self.begin_later(draft, now_ms)
        return draft.outcome(None)

    def _look_at(self, group_id: str, draft: Draft[CoordinatorRecord], now_ms: int) -> int:
        """Delete what has expired of a group, as far as the step has room; return the number of its positions."""
        group = self._groups.get(group_id)
        read = self._read_topics(group)
        if read is None:
            return 0
        room = RECORDS_PER_STEP - len(draft.records)
        records, count = self._offsets.expired(group, group_id, read, now_ms, room)
        draft.write(*records)
        if records:
            self._positions_gone(group_id)
        none_left = len(records) == count
        if none_left and (group is None or group.is_empty) and not self._offsets.has_pending(group_id):
            self._end(group, group_id, draft, now_ms)
        return count
