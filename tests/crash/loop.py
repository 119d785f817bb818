"""kill -9 in the middle of everything, kill after kill: `python -m tests.crash.loop --kills 1000 --seed 7`.

Producers, transactions, a compacted topic, topics that come and go, deleted records, and resizes of the first three
(`work` and the modules beside it) go on through the kills; now and then a process is killed while it starts. Clients
keep ordering.md, section 5: a batch whose outcome is unknown is sent again to the same partition with the same
sequence, also to the next process, until it is known; only a definite rejection moves its records elsewhere. A data
directory lives for LIFE kills, each with another seed and the other durability.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.crash.compacted import Compacted, cleanings
from tests.crash.deleted import Deleted
from tests.crash.plain import Plain
from tests.crash.topics import Topics
from tests.crash.transactions import Transactions
from tests.crash.work import Resizes, Work
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient

LIFE = 50
VERIFIED_EVERY = 10
SETTINGS = {
    "log_retention_check_interval_ms": 50,
    "log_cleaner_backoff_ms": 50,
    "reaper_interval_ms": 50,
    "transaction_abort_timed_out_transaction_cleanup_interval_ms": 200,
}


class CrashLoop:
    """One data directory, many processes on it."""

    def __init__(self, data: Path, *, durability: str = "fsync", seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.pausing = False
        self.kills = self.kills_of_starts = 0
        self.cleanings = 0.0
        self.failures: list[BaseException] = []
        self.plain, self.transactions, self.compacted = Plain(seed), Transactions(seed), Compacted(seed)
        self.topics, self.deleted = Topics(seed), Deleted(seed)
        self.works: list[Work] = [self.topics, self.deleted]
        for work in (self.plain, self.transactions, self.compacted):
            self.works += [work, Resizes(work.topic, seed)]
        self.broker = BrokerProcess(data, durability=durability, **SETTINGS).start()
        with WireClient(self.broker.port) as client:
            for work in self.works:
                work.prepare(client)

    def close(self) -> None:
        """End the process."""
        if self.broker.alive:
            self.broker.kill()

    def round(self) -> None:
        """Work for a moment, kill, start again."""
        self.pausing = False
        workers = [threading.Thread(target=self._guarded, args=(work.run,)) for work in self.works]
        for worker in workers:
            worker.start()
        time.sleep(0.05 + 0.45 * self.chance.random())
        with contextlib.suppress(OSError):  # It may be busy.
            self.cleanings += cleanings(self.broker)
        said = self.broker.said("error")
        self._kill()
        self.pausing = True
        for worker in workers:
            worker.join(180)
            assert not worker.is_alive(), "a client does not notice that its broker is gone"
        if self.failures:
            raise self.failures[0]
        assert not said, said
        while self.chance.random() < 0.15:
            self.broker.start(expect_ready=False)
            time.sleep(1.2 * self.broker.start_seconds * self.chance.random())
            self._kill()
            self.kills_of_starts += 1
        self.broker.start()

    def _kill(self) -> None:
        self.broker.kill()
        self.kills += 1

    def _guarded(self, run: Callable[[WireClient, Callable[[], bool]], None]) -> None:
        try:
            with WireClient(self.broker.port) as client:
                run(client, lambda: self.pausing)
        except (ConnectionError, TimeoutError):
            pass
        except BaseException as failure:
            self.failures.append(failure)

    def verify(self) -> None:
        """Bring everything to its outcome, then compare what is there with what was acknowledged."""
        with WireClient(self.broker.port, 60) as client:
            for work in self.works:
                work.settle(client)
            for work in reversed(self.works):  # Resizes end first.
                asyncio.run(work.verify(self.broker, client))
        assert not self.broker.said("error"), self.broker.said("error")

    @property
    def tells(self) -> bool:
        """Whether everything that is compared has happened."""
        return all(
            (
                self.plain.moves,
                *map(len, (self.transactions.ended[way] for way in ("committed", "aborted"))),
                self.cleanings,
                self.compacted.left < self.compacted.written,
                self.topics.deleted,
                self.deleted.start,
                self.deleted.large,
            )
        )

    def summary(self) -> str:
        """What was compared."""
        return f"{self.kills} kills, {self.kills_of_starts} of starts; " + "; ".join(it.summary() for it in self.works)


def live(data: Path, kills: int, durability: str, seed: int) -> CrashLoop:
    """Run one data directory through some kills."""
    loop = CrashLoop(data, durability=durability, seed=seed)
    try:
        while loop.kills < kills:
            checked = loop.kills // VERIFIED_EVERY
            loop.round()
            if loop.kills // VERIFIED_EVERY > checked or loop.kills >= kills:
                loop.verify()
    finally:
        loop.close()
    return loop


def main() -> int:
    """Run the long form."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.loop", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--keep", type=Path, help="a directory for the data of a life that fails")
    chosen = parser.parse_args()
    done, seed, began = 0, chosen.seed, time.monotonic()
    while done < chosen.kills:
        durability = ("fsync", "os")[seed % 2]
        with tempfile.TemporaryDirectory() as made:
            data = Path(made) / "data"
            try:
                loop = live(data, min(LIFE, chosen.kills - done), durability, seed)
            except BaseException:
                print(f"seed {seed}, durability {durability}, after {done} kills before it", flush=True)
                if chosen.keep is not None and data.exists():
                    data.rename(chosen.keep / f"life-{seed}")
                raise
        done += loop.kills
        print(f"seed {seed}, {durability}: {loop.summary()}", flush=True)
        seed += 1
    print(f"{done} kills in {time.monotonic() - began:.0f} s: nothing lost, doubled, out of order or back again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
