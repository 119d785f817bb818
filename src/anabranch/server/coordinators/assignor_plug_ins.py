"""Server-side assignors: the broker's own, and those that other distributions offer.

A distribution offers assignors under the entry point group `anabranch.group_assignors`. Members may choose those that
`group.consumer.assignors` lists. Entry points are read only if that setting lists others than the broker's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

from anabranch.base.errors import AnabranchError
from anabranch.runtime.events import EventLogger
from anabranch.server.settings import Settings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from anabranch.machines.groups.assignors.spec import Assignor
    from anabranch.machines.groups.consumer.target import AssignorFailed

ENTRY_POINTS = "anabranch.group_assignors"
OURS = frozenset({"uniform", "range"})
"""The names of `machines.groups.assignors.registry`, which imports more than a broker without groups needs."""
events = EventLogger("groups")


def assignor_plug_ins() -> dict[str, Callable[[], Assignor]]:
    """Return the offered assignors by name, each as a function that imports it once."""
    from importlib.metadata import entry_points  # 9 ms, which a broker without groups does without

    return {entry.name: _loader(entry) for entry in entry_points(group=ENTRY_POINTS)}


def _loader(entry: EntryPoint) -> Callable[[], Assignor]:
    @cache
    def load() -> Assignor:
        return cast("Assignor", entry.load())

    return load


def names_of(settings: Settings) -> tuple[str, ...]:
    """Return the server-side assignors that members may choose, the default first."""
    return tuple(settings.group_consumer_assignors.split(","))


def check_assignors(settings: Settings) -> None:
    """Raise AnabranchError if `group.consumer.assignors` names an assignor that is not installed."""
    unknown = [name for name in names_of(settings) if name not in OURS]
    if not unknown:
        return
    installed = {*OURS, *assignor_plug_ins()}
    missing = [name for name in unknown if name not in installed]
    if missing:
        raise AnabranchError(
            f"group.consumer.assignors names {', '.join(map(repr, missing))}, but installed are "
            f"{', '.join(sorted(installed))}. Install the distribution that offers it under the entry point group "
            f"{ENTRY_POINTS}, or leave it out."
        )


def report_assignor(failed: AssignorFailed) -> None:
    """Log that a group goes without the assignor that its members chose."""
    if failed.error is None:
        events.warning(
            "assignor not offered; the group uses the broker's default",
            group=failed.group_id,
            assignor=failed.assignor,
        )
    else:
        events.error(
            "assignor failed; the group keeps its assignment",
            exception=failed.error,
            group=failed.group_id,
            assignor=failed.assignor,
        )
