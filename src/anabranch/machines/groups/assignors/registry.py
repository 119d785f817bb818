"""Assignors by name: ours, and those that other distributions offer under the entry point group.

An entry point gives a function `Spec -> owner` (see `spec.Assignor`). Ours cannot be replaced. Nothing is imported
before it is asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from anabranch.base.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from anabranch.machines.groups.assignors.spec import Assignor

ENTRY_POINTS = "anabranch.group_assignors"
DEFAULT_ASSIGNOR = "uniform"
_OURS = {"uniform": "uniform", "range": "range"}


class UnknownAssignorError(ApiError):
    """A member asks for an assignor that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(
            ErrorCode.UNSUPPORTED_ASSIGNOR, f"There is no assignor {name!r}; supported are {', '.join(names())}."
        )


def names() -> tuple[str, ...]:
    """Return the names of all assignors, the default first."""
    return (*_OURS, *sorted(_offered()))


@cache
def assignor(name: str) -> Assignor:
    """Import the assignor of this name, or raise UnknownAssignorError."""
    if name in _OURS:
        return cast("Assignor", import_module(f"{__package__}.{_OURS[name]}").assign)
    offered = _offered().get(name)
    if offered is None:
        raise UnknownAssignorError(name)
    return cast("Assignor", offered.load())


@cache
def _offered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS) if entry.name not in _OURS}
