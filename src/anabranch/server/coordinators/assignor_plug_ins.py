"""Server-side assignors that other distributions offer under the entry point group `anabranch.group_assignors`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from anabranch.machines.groups.assignors.spec import Assignor

ENTRY_POINTS = "anabranch.group_assignors"


def assignor_plug_ins() -> dict[str, Callable[[], Assignor]]:
    """Return the offered assignors by name, each as a function that imports it once."""
    from importlib.metadata import entry_points  # 9 ms, which a broker without groups does without

    return {entry.name: _loader(entry) for entry in entry_points(group=ENTRY_POINTS)}


def _loader(entry: EntryPoint) -> Callable[[], Assignor]:
    @cache
    def load() -> Assignor:
        return cast("Assignor", entry.load())

    return load
