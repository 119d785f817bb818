"""kill -9 in the middle of produces and resizes, round after round: `python -m tests.crash.loop --rounds 200`.

Producers keep ordering.md, section 5: a batch whose outcome is unknown is sent again to the same partition with the
same sequence, also to the next process, until it is known; only a definite rejection moves its records elsewhere. At
the end every acknowledged record must be there once; a consumer must be handed the records of a key in the order of
their sending, across all partitions; and the last resize that was accepted must have been finished.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.client import Consumer
from anabranch.machines.placement import place
from tests.support.application_edge import ApplicationEdge, Handed
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

TOPIC = "t"
INITIAL, LARGEST = 2, 9
PRODUCERS = 3
READING_MAX_S = 60


class _Producer:
    """One idempotent producer of one key, with one batch in flight."""

    def __init__(self, loop: CrashLoop, number: int, seed: int) -> None:
        self.loop = loop
        self.key_hash = random.Random(seed * 1000 + number).getrandbits(31)
        self.name = b"p%d" % number
        self.sent = 0
        self.count = INITIAL
        self.producer_id = -1
        self.sequences: Counter[int] = Counter()
        self.acknowledged: list[int] = []
        self.pending: tuple[list[int], int, int] | None = None
        """Numbers, partition and sequence of the batch whose outcome is not known."""
        self.chance = random.Random(seed * 7919 + number)

    def run(self, client: WireClient) -> None:
        """Produce until the broker is gone."""
        if self.producer_id < 0:
            self.producer_id = client.producer_id()
        while not self.loop.pausing:
            if self.pending is None:
                numbers = list(range(self.sent, self.sent + self.chance.randint(1, 5)))
                self.sent += len(numbers)
                self.aim(numbers)
            self.send(client)

    def aim(self, numbers: list[int]) -> None:
        """Choose the partition of records that are in none."""
        partition = place(self.key_hash, INITIAL, self.count)
        self.pending = (numbers, partition, self.sequences[partition])

    def send(self, client: WireClient) -> None:
        """Send the pending batch once."""
        assert self.pending is not None
        numbers, partition, sequence = self.pending
        values = [self.name + b":%d" % number for number in numbers]
        data = batch(values, producer=(self.producer_id, 0, sequence))
        answer = client.produce(TOPIC, partition, data, count=self.count)
        error = ErrorCode.of(answer.error_code)
        if error is ErrorCode.NONE:
            self.sequences[partition] += len(numbers)
            self.acknowledged += numbers
            self.pending = None
        elif error is ErrorCode.INVALID_PARTITION_METADATA:
            self.count = client.metadata(TOPIC).undeleted_partition_count
            self.aim(numbers)
        elif error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            # Removed, or not made yet: either way it was not appended to what is there now.
            self.count = client.metadata(TOPIC).undeleted_partition_count
            self.aim(numbers)
        else:
            assert error.retriable, error
            time.sleep(0.01)


class CrashLoop:
    """One data directory, many processes on it."""

    def __init__(self, data: Path, *, durability: str = "fsync", seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.pausing = False
        self.kills = 0
        self.resizes = 0
        self.moves = 0
        """Records of the last verification whose predecessor of the same key lies in another partition."""
        self.phases: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.broker = BrokerProcess(data, durability=durability).start()
        self.producers = [_Producer(self, number, seed) for number in range(PRODUCERS)]
        with WireClient(self.broker.port) as client:
            client.create(TOPIC, INITIAL)

    def close(self) -> None:
        """End the process."""
        if self.broker.alive:
            self.broker.kill()

    def round(self) -> None:
        """Produce and resize for a moment, kill, start again."""
        self.pausing = False
        workers = [threading.Thread(target=self._guarded, args=(producer.run,)) for producer in self.producers]
        workers.append(threading.Thread(target=self._guarded, args=(self._resize,)))
        for worker in workers:
            worker.start()
        time.sleep(0.05 + 0.25 * self.chance.random())
        self.broker.kill()
        self.kills += 1
        self.pausing = True
        for worker in workers:
            worker.join(30)
        if self.failures:
            raise self.failures[0]
        self.broker.start()

    def _guarded(self, work: object) -> None:
        assert callable(work)
        try:
            with WireClient(self.broker.port) as client:
                work(client)
        except (ConnectionError, TimeoutError):
            pass
        except BaseException as failure:
            self.failures.append(failure)

    def _resize(self, client: WireClient) -> None:
        while not self.pausing:
            count = self.chance.randint(INITIAL, LARGEST)
            self.phases["asked"] += 1
            error = client.resize(TOPIC, count)
            self.phases["answered"] += 1
            if error is ErrorCode.NONE:
                self.resizes += 1
            else:
                assert error is ErrorCode.INVALID_PARTITIONS, error
            time.sleep(0.02 * self.chance.random())

    def verify(self) -> None:
        """Finish what is pending, then compare what is there with what was acknowledged."""
        with WireClient(self.broker.port) as client:
            for producer in self.producers:
                while producer.pending is not None:
                    producer.send(client)
            deadline = time.monotonic() + 20
            while self.broker.metrics()["anabranch_controller_resizing_topics"]:
                assert time.monotonic() < deadline, "a resize was not finished after the restart"
                time.sleep(0.05)
            shown = client.metadata(TOPIC)
            found: Counter[tuple[bytes, int]] = Counter()
            for partition in range(len(shown.partitions)):
                last: dict[bytes, int] = {}
                for _, value in client.read_all(TOPIC, partition):
                    name, _, digits = value.partition(b":")
                    assert int(digits) > last.get(name, -1), f"partition {partition}: {value!r} after {last}"
                    last[name] = int(digits)
                    found[name, int(digits)] += 1
        doubled = {record for record, times in found.items() if times > 1}
        assert not doubled, f"more than once: {sorted(doubled)[:10]}"
        for producer in self.producers:
            lost = [number for number in producer.acknowledged if (producer.name, number) not in found]
            assert not lost, f"acknowledged and lost: {producer.name!r} {lost[:10]}"
        self.moves = asyncio.run(self._read_in_order(len(found)))

    async def _read_in_order(self, count: int) -> int:
        """Read everything through our consumer, the records of each key in order; return how many changed partition.

        What a consumer without a group was handed counts at once: no commit is between it and the next record.
        """
        edge = ApplicationEdge()
        async with Consumer(f"127.0.0.1:{self.broker.port}", auto_offset_reset="earliest") as consumer:
            consumer.assign(TOPIC)
            async with asyncio.timeout(READING_MAX_S):
                while edge.first_deliveries < count:
                    for record in await consumer.poll(1.0, max_records=5_000):
                        name, _, number = bytes(record.value or b"").partition(b":")
                        place = record.topic, record.partition
                        edge.delivered("reader", Handed(name.decode(), "", int(number), place, record.offset))
                        edge.committed({place: record.offset + 1})
        assert not edge.repetitions, "a record was handed out twice"
        return edge.moves


def main() -> None:
    """Run the long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--durability", choices=["fsync", "os"], default="fsync")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        loop = CrashLoop(Path(data), durability=chosen.durability, seed=chosen.seed)
        try:
            for number in range(1, chosen.rounds + 1):
                loop.round()
                if number % 10 == 0 or number == chosen.rounds:
                    loop.verify()
                    records = sum(len(producer.acknowledged) for producer in loop.producers)
                    unanswered = loop.phases["asked"] - loop.phases["answered"]
                    print(
                        f"{number} kills, {records} records acknowledged, {loop.resizes} resizes answered, "
                        f"{unanswered} cut off: none lost or doubled, in order across {loop.moves} moves",
                        flush=True,
                    )
        finally:
            loop.close()


if __name__ == "__main__":
    main()
