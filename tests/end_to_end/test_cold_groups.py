"""The first member of a group that a broker has had: what computes its assignment is loaded beside the loop."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from anabranch.client import Admin, Consumer, Producer
from tests.support.broker import BrokerProcess

LOADING_S = 2.0
SLOW_IMPORT = f"""
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "anabranch.machines.groups.assignors.uniform":
            time.sleep({LOADING_S})

sys.meta_path.insert(0, Slow())
"""


def test_others_are_served_while_what_computes_an_assignment_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    broker = BrokerProcess(tmp_path / "data", group_initial_rebalance_delay_ms=0)
    broker.import_paths.append(tmp_path)
    broker.start()

    async def scenario() -> None:
        async with Admin(broker.address) as admin, Producer(broker.address) as producer, asyncio.timeout(60):
            await admin.create_topics("t", partitions=2)
            await (await producer.send("t", key="k", value=b"v"))
            longest = 0.0
            consumer = Consumer(broker.address, group_id="g", group_protocol="consumer", auto_offset_reset="earliest")
            async with consumer:
                consumer.subscribe("t")
                while not (reading := asyncio.ensure_future(consumer.poll(5))).done():
                    while not reading.done():
                        began = time.monotonic()
                        await (await producer.send("t", key="other", value=b"w"))
                        longest = max(longest, time.monotonic() - began)
                        await asyncio.sleep(0.01)
                    if reading.result():
                        break
            assert longest < LOADING_S / 2

    try:
        asyncio.run(scenario())
    finally:
        broker.kill()
