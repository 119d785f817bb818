"""Readers of model topics: they deliver in steps, commit now and then, and crash back to what they committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

Progress = TypeVar("Progress")
"""How far a partition was read."""


class Delivery(ABC, Generic[Progress]):
    """The progress of readers, by partition."""

    def __init__(self) -> None:
        self.committed: dict[int, Progress] = {}
        self.progress: dict[int, Progress] = {}

    @abstractmethod
    def step(self) -> bool:
        """Deliver something; False if no gate lets anything through."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether all records were delivered."""

    def commit(self) -> None:
        self.committed = dict(self.progress)

    def crash(self) -> None:
        self.progress = dict(self.committed)

    def drain(self) -> bool:
        """Deliver all that is left; False if the readers got stuck."""
        while True:
            self.commit()
            if not self.step():
                return self.is_done()
