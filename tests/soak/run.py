"""Groups through resizes and deaths for as long as one likes: `python -m tests.soak.run --minutes 30`.

Producers of ours send four keys each while the topic is resized a hundred times, its retiring partitions are emptied,
and the broker is killed. Three groups of ours (both protocols, several ways to commit) and one of stock consumers read
along: their members come, go, stop for a while and are killed. Each group's edge checks the order as it is read; at the
end everything that was sent must have been read. A stock group keeps no order across a shrink (ordering.md, section 8),
so it reads a second topic, which only grows.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.applications import LATE_NS, Group, Stage, Workers, own_processes, stage
from tests.support.broker import BrokerProcess

SMALLEST, LARGEST, GROWN_MAX = 2, 12, 40
KEYS = 4
QUICK = {
    "group.consumer.session.timeout.ms": 6_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.initial.rebalance.delay.ms": 0,
}
MEMBERS_MAX = 3


class Soak:
    """One broker, two topics, four groups, and chance."""

    def __init__(self, directory: Path, workers: Workers, *, seconds: float, resizes: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seconds = seconds
        self.resizes_max = resizes
        self.workers = workers
        self.broker = BrokerProcess(directory, **QUICK).start()
        self.broker.settings["listeners"] = f"127.0.0.1:{self.broker.port}"
        self.resizes = self.broker_kills = self.member_kills = self.comings = self.goings = self.stops = 0
        self.refused = 0.0
        self._processes = 0

    def run(self) -> None:
        """Run until the time is over and all resizes were made, then read everything. OrderError."""
        address = f"127.0.0.1:{self.broker.port}"
        with (
            stage(address, "breathing", SMALLEST, self.workers) as breathing,
            stage(address, "growing", SMALLEST, self.workers) as growing,
        ):
            breathing.group(commit="auto", delay_ms=1)
            breathing.group(commit="each", delay_ms=1)
            breathing.group(commit="each", protocol="classic", delay_ms=1)
            growing.group("stock", commit="each", delay_ms=1)
            for each in (breathing, growing):
                for group in each.groups:
                    self.join(group)
                each.until_all_owned()
                each.load.start(producers=2, keys=KEYS, per_second=80)
            self._happen(breathing, growing)
            self.note_refusals()
            for each in (breathing, growing):
                each.finish(60 + self.seconds / 4)
                each.check_that_it_tested(closed=False)
            self._report([breathing, growing], self.seconds)

    def _happen(self, breathing: Stage, growing: Stage) -> None:
        began = reported = time.monotonic()
        pause_s = self.seconds / self.resizes_max
        due = began
        while (now := time.monotonic()) < began + self.seconds or self.resizes < self.resizes_max:
            if now >= due and self.resizes < self.resizes_max:
                due = now + pause_s
                self.resize(breathing, growing)
            happens = self.chance.random()
            group = self.chance.choice([*breathing.groups, *growing.groups])
            if happens < 0.25:
                self.come_or_go(group)
            elif happens < 0.35:
                self.kill_member(group)
            elif happens < 0.6 and group.present:
                self.chance.choice(group.present).stand(self.chance.uniform(0.2, 1.5))
                self.stops += 1
            elif happens < 0.65:
                self.kill_broker()
            for each in (*breathing.groups, *growing.groups):
                assert not each.failures, each.failures[0]
                each.check(time.monotonic_ns() - LATE_NS)
            if now - reported > 30:
                reported = now
                self._report([breathing, growing], now - began)
            time.sleep(self.chance.uniform(0.1, 0.6))

    # -- what happens --------------------------------------------------------------------------------------------------

    def resize(self, breathing: Stage, growing: Stage) -> None:
        """Resize one topic to any count, and make the other one larger, as long as it may grow."""
        self.resizes += 1
        breathing.resize(self.chance.choice([n for n in range(SMALLEST, LARGEST) if n != breathing.count]))
        if growing.count < GROWN_MAX and self.resizes % max(1, self.resizes_max // 12) == 0:
            growing.resize(growing.count + self.chance.randint(1, 3))

    def join(self, group: Group) -> None:
        """Start a member in a process of its own."""
        self._processes += 1
        group.join(process=f"soak-{self._processes}")
        self.comings += 1

    def come_or_go(self, group: Group) -> None:
        """A member joins, or one leaves; one is always left."""
        if len(group.present) < 2 or (len(group.present) < MEMBERS_MAX and self.chance.random() < 0.5):
            self.join(group)
        elif len(group.present) > 1:
            self.chance.choice(group.present).leave()
            self.goings += 1

    def kill_member(self, group: Group) -> None:
        """Kill the process of a member; another one comes."""
        alone = [member for member in group.present if member is not group.members[0]]
        if alone:
            self.chance.choice(alone).kill()
            self.member_kills += 1
            self.join(group)

    def note_refusals(self) -> None:
        """Add up a counter that begins anew with every process."""
        found = self.broker.metrics()
        self.refused += sum(value for name, value in found.items() if name.startswith("anabranch_produce_stalebatches"))

    def kill_broker(self) -> None:
        """kill -9, and start again."""
        self.note_refusals()
        self.broker.kill()
        self.broker.start()
        self.broker_kills += 1

    def _report(self, stages: list[Stage], seconds: float) -> None:
        sent = sum(sum(each.load.sent.values()) for each in stages)
        groups = [group for each in stages for group in each.groups]
        read = sum(group.edge.first_deliveries for group in groups)
        moves = sum(group.edge.moves for group in groups)
        again = sum(group.edge.repetitions for group in groups)
        print(
            f"{seconds:.0f} s: {sent} records sent, {read} first deliveries, {moves} across partitions, {again} again; "
            f"{self.resizes} resizes, {self.refused:.0f} batches refused; members: {self.comings} came, {self.goings} "
            f"left, {self.member_kills} killed, {self.stops} stopped; {self.broker_kills} brokers killed",
            flush=True,
        )


def main() -> int:
    """Run; the exit code is 1 if the order was broken or a record is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--resizes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d%H%M", time.gmtime())))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory, own_processes() as workers:
        soak = Soak(Path(directory), workers, seconds=60 * given.minutes, resizes=given.resizes, seed=given.seed)
        try:
            soak.run()
        except AssertionError as error:
            print(f"FAILED: {error}")
            return 1
        finally:
            soak.broker.kill()
    print("every group was handed every record, in the order of its key")
    return 0


if __name__ == "__main__":
    sys.exit(main())
