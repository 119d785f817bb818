"""The memory for committed offsets: one bound for all groups of a broker (`offsets.max.bytes`).

What is committed stays, and commits that take no more memory than those that they replace always go on; an offset of a
further partition, or longer metadata, is refused when there is no room. Offsets of open transactions count, too.
"""

from __future__ import annotations

from typing import NamedTuple

from anabranch.base.memory import text_size
from anabranch.machines.groups.positions import POSITION_SIZE, Position
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.outcome import Draft


class OffsetsFull(NamedTuple):
    """Effect: log that an offset of a group was refused."""

    group_id: str
    size_max: int


class OffsetRoom:
    """The room that is left while a request is decided: its own commits count before they are applied."""

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._left: int | None = None
        self._id_size = 0

    def begin(self, id_size: int) -> None:
        """Begin the next request; `id_size`: what the id of its group takes with the first commit."""
        self._left = None
        self._id_size = id_size

    def refusal(
        self, group_id: str, before: Position | None, metadata: str, draft: Draft[CoordinatorRecord]
    ) -> str | None:
        """Take room for a commit that replaces `before`; return the sentence that refuses it where there is none."""
        growth = POSITION_SIZE + text_size(metadata) - (0 if before is None else before.size)
        if growth <= 0:
            return None
        if self._left is None:
            self._left = self._settings.offsets_size_max - self._settings.offsets_size()
        if growth + self._id_size <= self._left:
            self._left -= growth + self._id_size
            self._id_size = 0
            return None
        full = OffsetsFull(group_id, self._settings.offsets_size_max)
        if full not in draft.effects:
            draft.perform(full)
        return f"All committed offsets may take {full.size_max} bytes of memory: offsets.max.bytes."

    def is_short_of(self, size: int) -> bool:
        """Whether there is no room for a request of so many bytes that waits to be decided."""
        return self._settings.offsets_size() + size > self._settings.offsets_size_max

    @property
    def is_full(self) -> bool:
        """Whether there is no room for a position."""
        return self._settings.offsets_size() + POSITION_SIZE > self._settings.offsets_size_max
