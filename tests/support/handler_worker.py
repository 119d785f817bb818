"""A member that runs a parallel handler, in a process of its own: `python -m tests.support.handler_worker PLAN`.

PLAN is JSON. A line of JSON for every record that begins, ends, or is rejected, with the time of the monotonic clock.
Slow keys take long, and some records are rejected at first. A line on its input ends it; SIGUSR1 shows its stacks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import sys
import threading
import time
from typing import Any

from anabranch.client import Consumer, RejectError
from anabranch.client.consumer.record import Record

SLOW_KEYS = (b"slow-0", b"slow-1")


def say(event: str, record: Record) -> None:
    key, number = (record.key or b"").decode(), int(record.value or b"0")
    print(json.dumps([event, time.monotonic_ns(), key, number, record.partition, record.offset]), flush=True)


async def main(plan: dict[str, Any]) -> None:
    async def handle(record: Record) -> None:
        say("begin", record)
        await asyncio.sleep(plan["slow_s"] if record.key in SLOW_KEYS else plan["quick_s"])
        if plan["reject_every"] and record.offset % plan["reject_every"] == 0 and record.delivery_count == 1:
            say("reject", record)
            raise RejectError(retry_after=0.2)
        say("end", record)

    settings = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 300, **plan["settings"]}
    async with Consumer(plan["address"], group_id=plan["group"], **settings) as consumer:
        consumer.subscribe(plan["topic"])
        loop = asyncio.get_running_loop()

        def wait_for_end() -> None:
            sys.stdin.readline()
            loop.call_soon_threadsafe(consumer.stop)

        threading.Thread(target=wait_for_end, daemon=True).start()
        await consumer.run(handle, parallel=plan["parallel"])


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell has its background jobs ignore it.
    asyncio.run(main(json.loads(sys.argv[1])))
