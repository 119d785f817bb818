"""A member that consumes without keys, in a process of its own: `python -m tests.support.slice_worker PLAN`.

PLAN is JSON. A line of JSON for the offsets that each poll returned, for those that a commit counted, and for those
that it did not, with the time of the monotonic clock. A line on its input ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

from anabranch.client import ApiError, Consumer


def say(event: str, offsets: list[tuple[int, int]], why: str = "") -> None:
    print(json.dumps([event, time.monotonic_ns(), offsets, why]), flush=True)


async def main(plan: dict[str, Any]) -> None:
    loop, ended = asyncio.get_running_loop(), False

    def wait_for_end() -> None:
        nonlocal ended
        sys.stdin.readline()
        ended = True

    threading.Thread(target=wait_for_end, daemon=True).start()
    settings = {"auto_offset_reset": "earliest", "max_poll_records": 40, **plan["settings"]}
    async with Consumer(
        plan["address"], group_id=plan["group"], share="any", enable_auto_commit=False, **settings
    ) as consumer:
        if plan["assigned"]:
            consumer.assign([plan["topic"]], share="any")
        else:
            consumer.subscribe(plan["topic"])
        while not ended:
            try:
                records = await consumer.poll(0.2)
                if not records:
                    continue
                offsets = [(record.partition, record.offset) for record in records]
                say("got", offsets)
                until = loop.time() + plan["record_s"] * len(records)
                while (left := until - loop.time()) > 0:
                    await asyncio.sleep(min(left, 0.05))
                try:
                    await consumer.commit()
                except ApiError as error:
                    say("refused", offsets, str(error))
                else:
                    say("committed", offsets)
            except ApiError as error:
                say("failed", [], str(error))
                await asyncio.sleep(0.1)
    say("left", [])


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
