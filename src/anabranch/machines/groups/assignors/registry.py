"""Assignors by name: ours, and plug-ins that the shell has found.

A plug-in is a function that imports and returns an assignor `Spec -> owner` (see `spec.Assignor`). Ours cannot be
replaced. Nothing is imported before it is asked for, so that a name can be checked without NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch.base.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from anabranch.machines.groups.assignors.spec import Assignor

DEFAULT_ASSIGNOR = "uniform"


def _uniform() -> Assignor:
    from anabranch.machines.groups.assignors.uniform import assign

    return assign


def _range() -> Assignor:
    from anabranch.machines.groups.assignors.range import assign

    return assign


_OURS: Mapping[str, Callable[[], Assignor]] = {"uniform": _uniform, "range": _range}


class UnknownAssignorError(ApiError):
    """A member asks for an assignor that does not exist."""

    def __init__(self, name: str, supported: tuple[str, ...]) -> None:
        super().__init__(
            ErrorCode.UNSUPPORTED_ASSIGNOR, f"There is no assignor {name!r}; supported are {', '.join(supported)}."
        )


@dataclass(frozen=True, slots=True)
class Assignors:
    """The assignors of one coordinator, and the hook of its shell around the computation of a target."""

    plug_ins: Mapping[str, Callable[[], Assignor]] = field(default_factory=dict)
    uninterrupted: Callable[[], AbstractContextManager[None]] = nullcontext
    """Keeps the garbage collector from scanning the objects that a computation is making: half of its time."""

    def names(self) -> tuple[str, ...]:
        """Return the names of all assignors, the default first."""
        return (*_OURS, *sorted(self.plug_ins.keys() - _OURS.keys()))

    def get(self, name: str) -> Assignor:
        """Import the assignor of this name, or raise UnknownAssignorError."""
        load = _OURS.get(name) or self.plug_ins.get(name)
        if load is None:
            raise UnknownAssignorError(name, self.names())
        return load()
