"""A member that keeps balances in a table, in a process of its own: `python -m tests.support.table_worker PLAN`.

A booking is "NUMBER AMOUNT" with the account as its key, numbers of an account from 0 on. A balance is "COUNT SUM", so
that a member sees at once whether the balance it finds is that of exactly the bookings before. It says so where it is
not: a line of JSON. A line on its input ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

from anabranch.client import Consumer, KeyedTable, RejectError
from anabranch.client.consumer.record import Record


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def booked(table: KeyedTable, record: Record, record_named: Record | None = None) -> None:
    """Add a booking to its balance; tell of a balance that is not that of the bookings before."""
    assert record.key is not None and record.value is not None
    number, amount = map(int, record.value.split())
    count, total = map(int, (table.get(record.key) or b"0 0").split())
    if count != number:
        say("wrong", account=record.key.decode(), found=count, expected=number, at=[record.partition, record.offset])
    table.put(record.key, f"{count + 1} {total + amount}", record_named)
    assert table.get(record.key) == f"{count + 1} {total + amount}".encode()


async def main(plan: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    settings = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 200, **plan["settings"]}
    async with Consumer(plan["address"], group_id=plan["group"], **settings) as consumer:
        table = KeyedTable(consumer, plan["changelog"], plan["topic"], transaction_timeout_ms=3_000)
        consumer.subscribe(plan["topic"])

        def wait_for_end() -> None:
            sys.stdin.readline()
            loop.call_soon_threadsafe(ended.set)
            loop.call_soon_threadsafe(consumer.stop)

        threading.Thread(target=wait_for_end, daemon=True).start()
        say("started")
        if plan["parallel"]:

            async def handle(record: Record) -> None:
                booked(table, record)
                await asyncio.sleep(0.001)
                if record.offset % 50 == 7 and record.delivery_count == 1:
                    raise RejectError(retry_after=plan["retry_s"])

            await consumer.run(handle, parallel=plan["parallel"])
        while not ended.is_set():
            for record in await consumer.poll(timeout_s=0.1):
                booked(table, record)
    say("ended")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
