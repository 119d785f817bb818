"""A process of applications: `python -m tests.support.application_worker LIBRARY ADDRESS`, one JSON command a line.

Each application is a thread with one consumer. It tells what reaches it, with the time of the system's monotonic clock:
the partitions it is given, the records it is handed, and its commits, before and after each. With automatic commits it
asks for the group's offsets when a key comes from another partition than before: those are commits for certain. Every
50 ms the process says up to which time all was told: who reads several processes puts in order what they say.

A record's value names the life of its topic (a topic that is made again lives again), its producer, key and number.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

At = tuple[str, int]
POLL_S = 0.1
PARTITIONS_MAX = 64
MARK_S = 0.05


class Voice:
    """What a process says: lines whose times never lie behind a mark that was said before them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: dict[str, int] = {}
        """By application, the time of what it will tell later."""

    def reserve(self, name: str) -> int:
        """Return the time in ns of what an application will tell with it, in its next lines."""
        with self._lock:
            self._untold[name] = at = time.monotonic_ns()
            return at

    def release(self, name: str) -> None:
        """All was told of a time that was reserved."""
        with self._lock:
            del self._untold[name]

    def say(self, at: int | None = None, **event: object) -> None:
        """Write an event of a reserved time, by default of now."""
        with self._lock:
            self._write({"at": time.monotonic_ns() if at is None else at, **event})

    def mark(self) -> None:
        """Say up to which time all was told."""
        with self._lock:
            self._write({"event": "mark", "at": min(self._untold.values(), default=time.monotonic_ns()) - 1})

    def keep_marking(self) -> None:
        """Say so from now on, again and again."""
        while True:
            self.mark()
            time.sleep(MARK_S)

    def _write(self, event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


_voice = Voice()


@dataclass(frozen=True, slots=True)
class Plan:
    """How an application reads."""

    group: str
    topic: str
    protocol: str = "consumer"
    commit: str = "each"
    """`each` poll, `auto`, `never`, `told` by the test alone, or the number of records after which it commits."""
    commit_interval_ms: int = 300
    """Of automatic commits."""
    flushes: bool = False
    """Whether a listener of partition keys commits where a gate waits for it (our consumer)."""
    transactional: bool = False
    """Whether commits are those of a producer's transactions (our consumer)."""
    reset: str = "earliest"
    delay_ms: float = 0
    """How long it works on each record."""
    records_max: int = 200
    poll_interval_ms: int = 60_000
    session_ms: int = 10_000
    heartbeat_ms: int = 200
    """Both of the classic protocol."""
    isolation: str = "read_uncommitted"


class Application(ABC):
    """One consumer in a thread."""

    refusals: tuple[type[Exception], ...]
    """What `commit` raises if the coordinator refuses."""

    def __init__(self, name: str, address: str, plan: Plan) -> None:
        self.name = name
        self.address = address
        self.plan = plan
        self.leaves = threading.Event()
        self.stands_until = 0.0
        self.commits_after = 1 if plan.commit == "each" else int(plan.commit) if plan.commit.isdigit() else None
        """The number of records after which the application commits by itself."""
        self.told: SimpleQueue[dict[At, int] | None] = SimpleQueue()
        """Commits that the test asks for: these offsets, or None for all that was handed out."""
        self._owned: set[At] = set()
        self._lives: dict[At, str] = {}
        self._seen: dict[tuple[str, str], tuple[At, int]] = {}
        """By producer and key: where the newest record was, and its number."""
        self._uncommitted: dict[At, int] = {}
        self._handed = 0
        self._is_refused = False
        """Whether the newest commit was refused: a member that learns of a new epoch late is to commit again."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def open(self) -> None:
        """Make the consumer, and subscribe."""

    @abstractmethod
    def poll(self) -> list[tuple[At, int, bytes]]:
        """Return some records: partition, offset, value."""

    @abstractmethod
    def commit(self, offsets: dict[At, int]) -> None:
        """Commit, and return when it is done."""

    @abstractmethod
    def committed(self) -> dict[At, int]:
        """Return the group's committed offsets in the topic."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def tell(self, event: str, at: int | None = None, **more: object) -> None:
        _voice.say(at, of=self.name, event=event, **more)

    def assigned(self, partitions: Iterable[At]) -> None:
        given = set(partitions)
        self._owned |= given
        self._seen = {stream: at for stream, at in self._seen.items() if at[0] not in given}
        self.tell("assigned", partitions=sorted(given))

    def revoked(self, partitions: Iterable[At]) -> None:
        gone = set(partitions)
        if self.commits_after is not None:
            self._commit(gone)
        self._owned -= gone
        self._uncommitted = {at: end for at, end in self._uncommitted.items() if at not in gone}
        self.tell("revoked", partitions=sorted(gone))

    def lost(self, partitions: Iterable[At]) -> None:
        gone = set(partitions)
        self._owned -= gone
        self._uncommitted = {at: end for at, end in self._uncommitted.items() if at not in gone}
        self.tell("revoked", partitions=sorted(gone))

    def _run(self) -> None:
        try:
            self.open()
            while not self.leaves.is_set():
                if time.monotonic() < self.stands_until:
                    time.sleep(0.02)
                    continue
                self._take(self.poll())
                while not self.told.empty():
                    self._commit_told(self.told.get())
            if self.commits_after is not None:
                self._commit(self._owned)
            self.close()
            self.tell("left")
        except Exception:
            self.tell("failed", why=traceback.format_exc())

    def _take(self, records: list[tuple[At, int, bytes]]) -> None:
        at = _voice.reserve(self.name)
        try:
            handed = self._tell_records(at, records)
        finally:
            _voice.release(self.name)
        if not handed:
            if self._is_refused:  # The last records may be among those: nothing else would commit them.
                self._commit(self._owned)
            return
        self._handed += handed
        time.sleep(self.plan.delay_ms * handed / 1000)
        if self.commits_after is not None and self._handed >= self.commits_after:
            self._handed = 0
            self._commit(self._owned)

    def _tell_records(self, at: int, records: list[tuple[At, int, bytes]]) -> int:
        """Tell what was handed out at a time; return how many records that are."""
        rows = []
        is_news = False
        for partition, offset, value in records:
            life, producer, key, number = value.decode().split("|")
            self._lives[partition] = life
            is_news |= self._seen.get((producer, key)) != (partition, int(number) - 1)
            self._seen[producer, key] = partition, int(number)
            rows.append((self._place(partition), offset, producer, key, int(number)))
            self._uncommitted[partition] = offset + 1
        if is_news and self.plan.commit == "auto":
            self.tell("observed", at, offsets=[(*self._place(tp), end) for tp, end in self.committed().items()])
        if rows:
            self.tell("records", at, records=rows)
        return len(rows)

    def _place(self, partition: At) -> At:
        """The partition with the life of its topic."""
        return f"{partition[0]}~{self._lives.get(partition, '1')}", partition[1]

    def flush(self, partitions: Iterable[At]) -> None:
        """Commit what was handed out of partitions that a gate waits on."""
        self._commit(set(partitions))

    def _commit_told(self, offsets: dict[At, int] | None) -> None:
        """Commit what the test says; once more where the coordinator refuses, as the next poll may bring the epoch."""
        self._commit(self._owned, offsets)
        if self._is_refused:
            self._is_refused = False
            self.told.put(offsets)

    def _commit(self, partitions: set[At], offsets: dict[At, int] | None = None) -> None:
        """Commit these offsets, by default all that was handed out of the partitions."""
        if offsets is None:
            offsets = {at: end for at, end in self._uncommitted.items() if at in partitions}
        if not offsets:
            self._is_refused = False
            return
        said = [(*self._place(at), end) for at, end in offsets.items()]
        self.tell("committing", offsets=said)
        try:
            self.commit(offsets)
        except self.refusals as error:
            self.tell("refused", offsets=said, why=f"{type(error).__name__}: {error}")
            self._is_refused = True
            return
        self._is_refused = False
        self.tell("committed", offsets=said)
        self._uncommitted = {at: end for at, end in self._uncommitted.items() if offsets.get(at) != end}


def kind_of(library: str) -> type[Application]:
    """Return the applications of a library, loaded only here."""
    if library == "ours":
        from tests.support.application_ours import OurApplication

        return OurApplication
    from tests.support.application_stock import StockApplication

    return StockApplication


def main(library: str, address: str) -> None:
    """Run applications until standard input ends."""
    kind = kind_of(library)
    applications: dict[str, Application] = {}
    print(json.dumps({"event": "ready"}), flush=True)
    threading.Thread(target=_voice.keep_marking, name="marks", daemon=True).start()
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        name, do = command.pop("of"), command.pop("do")
        if do == "open":
            applications[name] = kind(name, address, Plan(**command))
            applications[name].thread.start()
        elif do == "stand":
            applications[name].stands_until = time.monotonic() + command["seconds"]
        elif do == "commit":
            offsets = command["offsets"]
            applications[name].told.put(None if offsets is None else {(at[0], at[1]): end for *at, end in offsets})
        elif do == "commit each":
            applications[name].commits_after = 1
            applications[name].told.put(None)
        else:
            applications.pop(name).leaves.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
