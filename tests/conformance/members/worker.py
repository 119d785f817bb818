"""A worker process of a Python library: `python -m tests.conformance.members.worker LIBRARY ADDRESS`.

Each member runs in a thread: it polls, tells what it was handed, commits that, tells that it has, and polls again.
What it owns is told inside the library's own callbacks, before the coordinator hears of a revocation.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

At = tuple[str, int]
"""A topic and a partition."""
POLL_S = 0.1
METADATA_MS = 300
_out = threading.Lock()


def tell(**event: object) -> None:
    """Say something to who started the worker."""
    line = json.dumps({"at": time.monotonic_ns(), **event})
    with _out:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a member is to be."""

    address: str
    group: str
    protocol: str
    assignor: str | None
    session_timeout_ms: int
    topics: Sequence[str] = ()
    pattern: str | None = None
    instance: str | None = None
    reset: str = "earliest"


@dataclass(frozen=True, slots=True)
class Got:
    """A record that a member was handed."""

    topic: str
    partition: int
    offset: int
    value: bytes


class Member(ABC):
    """One consumer of a library, in its own thread."""

    def __init__(self, name: str, asked: Asked) -> None:
        self.asked = asked
        self._name = name
        self._owned: set[At] = set()
        self._uncommitted: dict[At, int] = {}
        self._leaves = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def open(self) -> None:
        """Make the consumer, and subscribe."""

    @abstractmethod
    def poll(self) -> Sequence[Got]:
        """Wait for records, but not for long."""

    @abstractmethod
    def commit(self, offsets: dict[At, int]) -> Iterable[At]:
        """Commit, and return what is known to be committed; what the library refuses is raised or left out."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    refusals: tuple[type[Exception], ...] = ()
    """What `commit` raises when the coordinator says no."""

    def assigned(self, more: Iterable[At]) -> None:
        """Own these too; who is leaving takes no more, whatever it is given meanwhile."""
        if not self._leaves.is_set():
            self._own(self._owned | set(more))

    def revoked(self, gone: Iterable[At]) -> None:
        """Own these no more."""
        self._own(self._owned - set(gone))

    def owns(self, all_: Iterable[At]) -> None:
        """Own exactly these, as `assigned`."""
        if not self._leaves.is_set():
            self._own(set(all_))

    def _own(self, owned: set[At]) -> None:
        self._owned = owned
        tell(member=self._name, event="owns", partitions=sorted(owned))

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        self._leaves.set()

    def _run(self) -> None:
        try:
            self.open()
            while not self._leaves.is_set():
                self._take(self.poll())
            self._own(set())
            self.close()
            tell(member=self._name, event="left")
        except Exception:
            tell(member=self._name, event="failed", why=traceback.format_exc())

    def _take(self, records: Sequence[Got]) -> None:
        """Tell what there is, and commit it with what could not be committed before."""
        if records:
            rows = [(got.topic, got.partition, got.offset, got.value.decode()) for got in records]
            tell(member=self._name, event="records", records=rows)
            self._uncommitted |= {(got.topic, got.partition): got.offset + 1 for got in records}
        offsets = self._uncommitted = {at: end for at, end in self._uncommitted.items() if at in self._owned}
        if not offsets:
            return
        tell(member=self._name, event="committing", offsets=[(*at, end) for at, end in offsets.items()])
        try:
            done = list(self.commit(offsets))
        except self.refusals as error:
            tell(member=self._name, event="refused", why=f"{type(error).__name__}: {error}", again=True)
        else:
            tell(member=self._name, event="committed", offsets=[(*at, offsets[at]) for at in done])
            self._uncommitted = {}


def main(library: str, address: str) -> None:
    """Host members until standard input ends."""
    kind: type[Member] = importlib.import_module(f"tests.conformance.members.{library}").LibraryMember
    members: dict[str, Member] = {}
    tell(event="ready")
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        name = command.pop("member")
        if command.pop("do") == "open":
            members[name] = kind(name, Asked(address=address, **command))
            members[name].start()
        else:
            members.pop(name).leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
