"""Balances of accounts that are right at every moment: `python examples/balances.py`.

Bookings come in while members join, one is killed, and the topic is resized, twice. The balances are at the members
that read the bookings of their accounts, in a `KeyedTable`. Where there are more members than partitions, they share
these by ranges of keys. Bookings of an account are numbered, and each balance knows how many bookings it has: a member
that finds another balance than that of exactly the bookings before says WRONG. After each step a picture shows which
member owns which accounts: the key space from left to right, a line for each family of partitions, and the first letter
of each member's name.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from anabranch.client import Admin, Consumer, KeyedTable, Producer, Record, TopicPartition
from anabranch.client.admin.groups import MemberDescription
from anabranch.machines.keyspace import SPACE, Interval, interval
from anabranch.machines.lineage import Lineage

TOPIC, CHANGELOG, GROUP = "bookings", "balances", "bank"
ACCOUNTS = [f"account-{number}" for number in range(50)]
WIDTH = 64
QUICK = {
    "group.consumer.session.timeout.ms": 5_000,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
}


async def member(address: str, name: str) -> None:
    """Keep the balances of the accounts whose bookings this member reads."""
    async with Consumer(
        address,
        group_id=GROUP,
        client_id=name,
        allow_key_share=True,
        auto_offset_reset="earliest",
        auto_commit_interval_ms=200,
    ) as consumer:
        balances = KeyedTable(consumer, CHANGELOG, TOPIC)
        consumer.subscribe(TOPIC)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)

        async def book(record: Record) -> None:
            booking = json.loads(record.value or b"")
            balance = json.loads(balances.get(record.key or b"") or b'{"bookings": 0, "sum": 0}')
            if balance["bookings"] != booking["number"]:
                print(f"WRONG: booking {booking['number']} of {record.key!r} finds {balance}", flush=True)
            balance = {"bookings": balance["bookings"] + 1, "sum": balance["sum"] + booking["amount"]}
            balances.put(record.key or b"", json.dumps(balance))
            await asyncio.sleep(0.001)  # Ask a service: other accounts go on.

        await consumer.run(book, parallel=16)


def intervals(lineage: Lineage, members: Iterable[MemberDescription]) -> Iterator[tuple[int, Interval, str]]:
    """Yield the families, with the intervals of their keys that members own: of a partition all, or some ranges."""
    for partition in range(lineage.count):
        held = interval(partition, lineage.count, lineage.initial)
        for one in members:
            for keys in one.keys(TopicPartition(TOPIC, partition)):
                if (both := keys.overlap(held)) is not None:
                    yield partition % lineage.initial, both, one.client_id


class Bank:
    """The broker, the members and the bookings."""

    def __init__(self, data: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        settings = {"listeners": self.address, **QUICK}
        given = [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "anabranch.cli", "serve", "--data", str(data), *given]
        self.processes = {"broker": subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)}
        self.said: list[str] = []
        self.expected = {account: {"bookings": 0, "sum": 0} for account in ACCOUNTS}

    def join(self, name: str) -> None:
        """Start a member."""
        command = [sys.executable, __file__, "member", self.address, name]
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    async def book(self, seconds: float) -> None:
        """Send bookings for a while."""
        async with Producer(self.address) as producer:
            for turn in range(int(seconds * 20)):
                for number, account in enumerate(ACCOUNTS):
                    known = self.expected[account]
                    booking = {"number": known["bookings"], "amount": (turn * 7 + number) % 100 - 40}
                    known["bookings"] += 1
                    known["sum"] += booking["amount"]
                    await producer.send(TOPIC, json.dumps(booking), key=account)
                await asyncio.sleep(0.05)

    async def show(self, admin: Admin, what: str) -> None:
        """Draw who owns which intervals of the key space."""
        for _ in range(50):  # Keys have no owner between two members, and a new partition until its keys are there.
            lineage = await admin.lineage(TOPIC)
            group = (await admin.describe_groups(GROUP))[GROUP]
            owned = list(intervals(lineage, group.members))
            complete = sum(keys.size for _, keys, _ in owned) == lineage.initial * SPACE.size
            if complete and not any(one.pending or one.revoking for one in group.members):
                break
            await asyncio.sleep(0.2)
        print(f"\n{what}: {lineage.count} partitions, {len(group.members)} members")
        for family in range(lineage.initial):
            line = ["."] * WIDTH
            for name, keys in [(name, keys) for number, keys, name in owned if number == family]:
                first, last = (place * WIDTH // SPACE.size for place in keys)
                line[first : last + 1] = name[:1] * (last + 1 - first)
            print(f"  family {family}  |{''.join(line)}|")

    async def balances(self) -> dict[str, dict[str, int]]:
        """Read the balances that are committed."""
        found: dict[str, dict[str, int]] = {}
        async with Consumer(self.address, isolation_level="read_committed", auto_offset_reset="earliest") as consumer:
            consumer.assign(CHANGELOG)
            ends = await consumer.end_offsets()
            while any([await consumer.position(*tp) < end for tp, end in ends.items()]):
                for record in await consumer.poll(0.2):
                    found[(record.key or b"").decode()] = json.loads(record.value or b"")
        return found

    def end(self) -> None:
        """End all processes, members first; keep what members have said."""
        for name, process in reversed(self.processes.items()):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.said.append(process.communicate(timeout=10)[0] or "")
                continue
            process.kill()
            print(f"{name} did not end by itself")


async def run(bank: Bank, pace: float) -> bool:
    """Let the bank live through it all, in seconds times `pace`; return whether the balances are right."""
    async with Admin(bank.address) as admin:
        while True:
            with suppress(Exception):
                await admin.create_topics(TOPIC, partitions=2, configs={"accept.range.fetch": "true"})
                break
            await asyncio.sleep(0.2)
        for name in ("ann", "bob", "cora"):
            bank.join(name)
        await bank.book(3 * pace)
        await bank.show(admin, "Three members share two partitions")
        bookings = asyncio.create_task(bank.book(8 * pace))
        await admin.resize(TOPIC, 5)
        await asyncio.sleep(2 * pace)
        await bank.show(admin, "Resized to five partitions while bookings come in")
        bank.processes["bob"].kill()
        bank.join("dora")
        await asyncio.sleep(4 * pace)
        await bank.show(admin, "bob was killed, dora has joined")
        await admin.resize(TOPIC, 2)
        await bookings
        await bank.show(admin, "Resized to two partitions again")
        for _ in range(300):
            if (found := await bank.balances()) == bank.expected:
                break
            await asyncio.sleep(0.3)
    count = sum(balance["bookings"] for balance in bank.expected.values())
    verdict = "right" if found == bank.expected else "WRONG"
    print(f"\n{count} bookings on {len(ACCOUNTS)} accounts: the balances are {verdict}")
    return found == bank.expected


def main() -> int:
    """Run the example, or one of its members."""
    if sys.argv[1:2] == ["member"]:
        asyncio.run(member(*sys.argv[2:4]))
        return 0
    with tempfile.TemporaryDirectory() as data:
        bank = Bank(Path(data))
        try:
            right = asyncio.run(run(bank, 0.4 if "--quick" in sys.argv else 1.0))
        finally:
            bank.end()
    wrong = [line for said in bank.said for line in said.splitlines() if "WRONG" in line]
    print("\n".join(wrong) or "At every moment each member found the balance of exactly the bookings before.")
    return 0 if right and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
