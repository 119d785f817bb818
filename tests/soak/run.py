"""Groups through resizes and deaths for as long as one likes: `python -m tests.soak.run --minutes 30`.

Producers of ours send four keys each while the topic is resized a hundred times, its retiring partitions are emptied,
and the broker is killed. Three groups of ours (both protocols, several ways to commit) and one of stock consumers read
along: their members come, go, stop for a while and are killed. Each group's edge checks the order as it is read; at the
end everything that was sent must have been read, but for records that were deleted before the group had committed them.
A stock group keeps no order across a shrink (ordering.md, section 8), so it reads a second topic, which only grows.
A run in which one of these things never happened fails, too.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from anabranch.client import ApiError, ErrorCode
from tests.support.applications import CLOSED_MS_MIN, Group, Stage, Workers, own_processes, stage
from tests.support.broker import BrokerProcess

SMALLEST, LARGEST, GROWN_MAX = 2, 12, 40
KEYS = 4
QUICK = {
    "group.consumer.session.timeout.ms": 6_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.initial.rebalance.delay.ms": 0,
    "reaper.interval.ms": 200,
}
MEMBERS_MAX = 3
MUST_HAPPEN = {
    "goings": "no member left",
    "stops": "no member stopped for a while",
    "member_kills": "no member was killed",
    "broker_kills": "no broker was killed",
    "deletions": "no records of a retiring partition were deleted",
    "unread_deletions": "no records were deleted before all groups had committed them",
    "removals": "no retiring partition was emptied and removed",
}
"""What a run counts, and what is said where it did not happen."""
UNREAD = 0.3
"""How often a shrink is followed by a deletion of records that no group has committed."""
STANDING_S = 2.0
REMOVED_S = 0.5
"""Within which the broker mostly removes empty partitions."""
PASSED_S = 60.0
"""Within which all groups must be beyond records that were deleted before they had committed them."""
ANSWER_S = 60.0
"""Within which a broker tells its metrics, on a machine with other work."""


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
        self.deletions = self.unread_deletions = self.removals = 0
        self.refused = 0.0
        self.stages: list[Stage] = []
        self._processes = 0
        self._unread: tuple[int, int, float] | None = None
        """A partition, the offset up to which records were deleted that not all groups had read, and the time limit."""
        self._retiring: frozenset[int] = frozenset()
        self._began = time.monotonic()

    def run(self) -> None:
        """Run until the time is over and all resizes were made, then read everything. OrderError.

        What has not happened by chance is waited for once more as long.
        """
        address = f"127.0.0.1:{self.broker.port}"
        with (
            stage(address, "breathing", SMALLEST, self.workers) as breathing,
            stage(address, "growing", SMALLEST, self.workers) as growing,
        ):
            self.stages = [breathing, growing]
            breathing.group(commit="auto", delay_ms=1)
            breathing.group(commit="each", delay_ms=1)
            breathing.group(commit="each", protocol="classic", delay_ms=1)
            growing.group("stock", commit="each", delay_ms=1)
            for each in self.stages:
                for group in each.groups:
                    self.join(group)
                each.until_all_owned()
                each.load.start(producers=2, keys=KEYS, per_second=80)
            self._happen(breathing, growing)
            self.note_refusals()
            for each in self.stages:
                each.finish(60 + self.seconds / 4)
            self.check_that_it_tested()

    def _happen(self, breathing: Stage, growing: Stage) -> None:
        began = reported = time.monotonic()
        pause_s = self.seconds / self.resizes_max
        due = began
        while (
            (now := time.monotonic()) < began + self.seconds
            or self.resizes < self.resizes_max
            or (self.untested() and now < began + 2 * self.seconds)
        ):
            if self.is_passed(breathing) and now >= due and self.resizes < self.resizes_max:
                due = now + pause_s
                self.resize(breathing, growing)
            happens = self.chance.random()
            group = self.chance.choice([*breathing.groups, *growing.groups])
            is_late = now >= began + self.seconds / 2  # A slow machine takes few of these steps.
            if is_late and not self.broker_kills and self._unread is None:
                self.kill_broker()
            elif happens < 0.25:
                self.come_or_go(group)
            elif happens < 0.35 or (is_late and not self.member_kills):
                self.kill_member(group)
            elif happens < 0.6 and group.staying:
                self.chance.choice(group.staying).stand(self.chance.uniform(0.2, 1.5))
                self.stops += 1
            elif happens < 0.68 and self._unread is None:
                self.kill_broker()
            elif happens < 0.95:
                self.delete_retiring(breathing)
            for each in (*breathing.groups, *growing.groups):
                assert not each.failures, each.failures[0]
                self.end_processes(each)
                each.check(time.monotonic_ns())
            if now - reported > 30:
                reported = now
                print(self.summary(), flush=True)
            time.sleep(self.chance.uniform(0.1, 0.6))

    # -- what happens --------------------------------------------------------------------------------------------------

    def resize(self, breathing: Stage, growing: Stage) -> None:
        """Resize one topic to any count, and make the other one larger, as long as it may grow."""
        self.resizes += 1
        count = self.chance.choice([n for n in range(SMALLEST, LARGEST) if n != breathing.count])
        unread = count < breathing.count and (not self.unread_deletions or self.chance.random() < UNREAD)
        if unread:
            self._stand(breathing)
        elif count > breathing.count:  # Those that are read are removed from the top, and made again.
            self.delete_retiring(breathing)
            time.sleep(REMOVED_S)
            self.delete_retiring(breathing)
        breathing.resize(count)
        if unread:
            self.delete_retiring(breathing, unread=True)
        if growing.count < GROWN_MAX and self.resizes % max(1, self.resizes_max // 12) == 0:
            self._stand(growing)
            growing.resize(growing.count + self.chance.randint(1, 3))

    def _stand(self, stage: Stage) -> None:
        """Have nobody read for a while, so that records wait in the partitions that a resize concerns."""
        for member in [member for group in stage.groups for member in group.staying]:
            member.stand(STANDING_S)
            self.stops += 1
        time.sleep(STANDING_S / 4)

    def delete_retiring(self, stage: Stage, *, unread: bool = False) -> None:
        """Delete what all groups have committed of the retiring partitions, or `unread` some other records of one.

        Of the others never all: of a partition that is removed nobody knows what a slow owner still has (ADR 0063).
        """
        try:
            spans = stage.admin.topic_offsets(stage.topic)
        except ApiError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:  # One may be removed meanwhile.
                raise
            return
        retiring = frozenset(number for number in spans if number >= stage.count)
        self.removals += len({number for number in self._retiring if number >= stage.count} - retiring)
        self._retiring = retiring
        numbers = [number for number in sorted(retiring) if spans[number].start < spans[number].end]
        if not numbers:
            return
        read = {number: max(spans[number].start, min(stage.committed(number).values())) for number in numbers}
        if unread:
            number = max(read, key=lambda each: spans[each].end - read[each])
            if read[number] + 1 >= spans[number].end:
                return
            read = {number: self.chance.randint(read[number] + 1, spans[number].end - 1)}
            self._unread = number, read[number], time.monotonic() + PASSED_S
            self.unread_deletions += 1
        for number, offset in read.items():
            if offset > spans[number].start:
                stage.delete_records(number, offset)
                self.deletions += 1
                self._note(f"records of {number} are deleted up to {offset} of {spans[number].end}; unread: {unread}")

    def is_passed(self, stage: Stage) -> bool:
        """Whether all groups are beyond what was deleted unread: until then nothing is resized, and no broker killed.

        A resize and a start of the broker make a group forget who may have fetched deleted records (ADR 0063).
        """
        if self._unread is not None:
            number, offset, deadline = self._unread
            behind = {name: at for name, at in stage.committed(number).items() if at < offset}
            assert not behind or time.monotonic() < deadline, f"{number} starts at {offset}; {behind} stand still"
            if not behind:
                self._unread = None
        return self._unread is None

    def join(self, group: Group) -> None:
        """Start a member in a process of its own."""
        self._processes += 1
        group.join(process=f"soak-{self._processes}")
        self.comings += 1

    def come_or_go(self, group: Group) -> None:
        """A member joins, or one leaves; one is always left."""
        if len(group.staying) < 2 or (len(group.staying) < MEMBERS_MAX and self.chance.random() < 0.5):
            self.join(group)
        else:
            self.chance.choice(group.staying).leave()
            self.goings += 1

    def end_processes(self, group: Group) -> None:
        """End the processes of members that have left: of 340 in half an hour each would keep its 70 MB.

        The first members of all groups share one.
        """
        for member in group.members[1:]:
            if member.is_gone and member.worker.alive:
                member.worker.kill()

    def kill_member(self, group: Group) -> None:
        """Kill the process of a member; another one comes."""
        alone = [member for member in group.present if member is not group.members[0]]
        if alone:
            self.chance.choice(alone).kill()
            self.member_kills += 1
            self.join(group)

    def note_refusals(self) -> None:
        """Add up a counter that begins anew with every process."""
        try:
            found = self.broker.metrics(ANSWER_S)
        except OSError as error:
            raise AssertionError(f"the broker does not answer within {ANSWER_S:.0f} s: {error}") from error
        self.refused += sum(value for name, value in found.items() if name.startswith("anabranch_produce_stalebatches"))

    def kill_broker(self) -> None:
        """kill -9, and start again."""
        self.note_refusals()
        self._note("the broker is killed")
        began_ns = time.monotonic_ns()
        self.broker.kill()
        self.broker.start()
        for each in self.stages:
            each.outages.append((began_ns, time.monotonic_ns()))
        self._note("the broker is back")
        self.broker_kills += 1

    def _note(self, what: str) -> None:
        for group in self._groups:
            group.story.note(time.monotonic_ns(), "", what)

    # -- what it came to -----------------------------------------------------------------------------------------------

    def untested(self) -> list[str]:
        """Return what a soak is about and has not happened so far, in any of the groups that it concerns."""
        missing = [never for name, never in MUST_HAPPEN.items() if not getattr(self, name)]
        return missing + [f"no gate was closed for {group.name}" for group in self._groups if not group.closed_ms]

    def check_that_it_tested(self) -> None:
        """Check that each thing has happened that a soak is about."""
        assert self.resizes >= self.resizes_max, f"{self.resizes} resizes instead of {self.resizes_max}"
        assert self.refused > 0, "no producer was refused for an old partition count"
        missing = self.untested()
        assert not missing, "; ".join(missing)
        for each in self.stages:
            each.check_that_it_tested()

    @property
    def _groups(self) -> list[Group]:
        return [group for each in self.stages for group in each.groups]

    def summary(self) -> str:
        """Return what was sent, read and done so far, in one line."""
        sent = sum(sum(each.load.sent.values()) for each in self.stages)
        read = sum(group.edge.first_deliveries for group in self._groups)
        moves = sum(group.edge.moves for group in self._groups)
        again = sum(group.edge.repetitions for group in self._groups)
        skipped = sum(group.edge.skipped for group in self._groups)
        return (
            f"{time.monotonic() - self._began:.0f} s: {sent} records sent, {read} first deliveries, {moves} across "
            f"partitions, {again} again, {skipped} deleted unread; {self.resizes} resizes, {self.refused:.0f} batches "
            f"refused; {self.deletions} deletions, {self.unread_deletions} of unread records, {self.removals} emptied "
            f"partitions removed; members: {self.comings} came, {self.goings} left, {self.member_kills} killed, "
            f"{self.stops} stopped; {self.broker_kills} brokers killed"
        )

    def report(self) -> str:
        """Return the summary, and a line for each group: what it read, and how long its gates were closed for sure."""
        lines = [self.summary()]
        for group in self._groups:
            edge, closed = group.edge, sorted(group.closed_ms)
            waited = (
                f", half of them {closed[len(closed) // 2]:.0f} ms, the longest {closed[-1]:.0f} ms" if closed else ""
            )
            kind = ", ".join((group.library, group.plan.get("protocol", "consumer"), f"commit {group.plan['commit']}"))
            lines.append(
                f"  {group.name} ({kind}): {edge.first_deliveries} first deliveries in {len(edge.by_partition)} "
                f"partitions, {edge.moves} across partitions, {edge.repetitions} again; "
                f"{len(closed)} records waited at a gate for {CLOSED_MS_MIN} ms or more{waited}"
            )
        return "\n".join(lines)


def main() -> int:
    """Run; the exit code is 1 if the order was broken, a record is missing, or something was not tested."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--resizes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d%H%M", time.gmtime())))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    with own_processes() as workers:
        soak = Soak(directory, workers, seconds=60 * given.minutes, resizes=given.resizes, seed=given.seed)
        try:
            soak.run()
        except AssertionError as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            print(f"{soak.report()}\nFAILED: {error}\n{notes}")
            soak.broker.kill()
            (directory / "broker.log").write_text("".join(f"{json.dumps(line)}\n" for line in soak.broker.lines))
            print(f"the data directory, and what the broker said, are kept in {directory}")
            return 1
        finally:
            soak.broker.kill()
        print(soak.report())
    shutil.rmtree(directory)
    print("every group was handed every record that was not deleted before, in the order of its key")
    return 0


if __name__ == "__main__":
    sys.exit(main())
