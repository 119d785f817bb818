"""A process with some members of a group that share partitions: each record that was processed is a line of its file.

    python -m tests.support.share_worker ADDRESS TOPIC GROUP FILE MODE...

One member for each MODE: `poll`, `arrow`, or `run` (the parallel handler). A line is written before its record counts
as processed, with the time of the machine's clock, so that lines of several processes can be put in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from typing import Any

from anabranch.client import Consumer

POLLED = 30


class Member:
    """One member, and the file that it writes to."""

    def __init__(self, address: str, topic: str, group: str, out: int, mode: str, name: str) -> None:
        self._topic, self._out, self._mode, self._name = topic, out, mode, name
        self._chance = random.Random(name)
        self.consumer = Consumer(
            address,
            group_id=group,
            allow_key_share=True,
            auto_offset_reset="earliest",
            auto_commit_interval_ms=300,
            metadata_max_age_ms=2_000,
        )

    def write(self, partition: int, offset: int, key: bytes, value: bytes) -> None:
        line = [time.monotonic_ns(), self._name, partition, offset, key.decode(), int(value)]
        os.write(self._out, (json.dumps(line) + "\n").encode())

    async def read(self, ends: asyncio.Event) -> None:
        self.consumer.subscribe(self._topic, on_partitions_lost=self._lost)
        if self._mode == "run":
            waiting = asyncio.create_task(ends.wait())
            waiting.add_done_callback(lambda _: self.consumer.stop())
            await self.consumer.run(self._handle, parallel=16)
            waiting.cancel()
        while not ends.is_set():
            if self._mode == "arrow":
                table = await self.consumer.poll_arrow(0.3, max_bytes=2_000)
                for row in table.to_pylist():
                    self.write(row["partition"], row["offset"], row["key"], row["value"])
            else:
                for record in await self.consumer.poll(0.3, max_records=POLLED):
                    self.write(record.partition, record.offset, record.key or b"", record.value or b"")
            await asyncio.sleep(0.02)
        await self.consumer.close()

    def _lost(self, _: Any) -> None:
        """The group took this member for dead, as it may on a busy machine."""
        self.write(-1, -1, b"", b"0")

    async def _handle(self, record: Any) -> None:
        await asyncio.sleep(0.02 * self._chance.random())
        self.write(record.partition, record.offset, record.key, record.value)


async def main(address: str, topic: str, group: str, path: str, *modes: str) -> None:
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    async with Consumer(address, auto_offset_reset="earliest") as first:  # Loads what decodes records.
        first.assign(topic)
        await first.poll(20.0, max_records=1)
    ends = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends.set)
    name = os.path.basename(path)
    members = [Member(address, topic, group, out, mode, f"{name}-{mode}") for mode in modes]
    await asyncio.gather(*(member.read(ends) for member in members))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
