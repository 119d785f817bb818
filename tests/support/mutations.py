"""Changes of shipped code that break one rule each (`tests.mutations`)."""

from __future__ import annotations

from dataclasses import dataclass

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Edit:
    """One change of a source file."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutation:
    """A rule that is broken, and by what that must be seen."""

    name: str
    edits: tuple[Edit, ...]
    simulator: tuple[str, ...]
    """Empty where only delays or another simulator's rules tell: unit tests see those without a run of chance."""
    test: str
