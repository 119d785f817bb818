"""A step on the loop of a real broker that takes long is told with the name of the API that it was done for."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.protocol.messages.metadata import MetadataRequest
from tests.support.broker import SLOW_STEP, BrokerProcess
from tests.support.wire import WireClient

AT_ONCE_S, LATER_S = 0.3, 0.6
"""How long the step of Metadata takes, and that of CreateTopics: longer than any other, and in this order."""
SLOW_HANDLERS = f"""
import asyncio, time
from anabranch.runtime import loop_steps
from anabranch.server.handlers import ENDPOINTS

loop_steps.LOG_INTERVAL_S = 0.0

def work(seconds):
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass

def slow(api_key, make):
    ENDPOINTS[api_key] = ENDPOINTS[api_key]._replace(handler=make(ENDPOINTS[api_key].handler))

def at_once(handler):
    def handle(*given):
        work({AT_ONCE_S})
        return handler(*given)
    return handle

def later(handler):
    async def handle(*given):
        await asyncio.sleep(0.01)
        work({LATER_S})
        return await handler(*given)
    return handle

slow(3, at_once)
slow(19, later)
"""
"""Has a request of Metadata take long in the callback that reads it, one of CreateTopics in a task."""


@pytest.mark.parametrize(("name", "seconds"), [("Metadata", AT_ONCE_S), ("CreateTopics", LATER_S)])
def test_a_slow_step_is_told_with_the_name_of_its_api(tmp_path: Path, name: str, seconds: float) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_HANDLERS)
    broker = BrokerProcess(tmp_path / "data")
    broker.import_paths.append(tmp_path)
    try:
        broker.start()
        with WireClient(broker.port) as client:
            if name == "Metadata":
                client.call(MetadataRequest(topics=[]))
            else:
                client.create("t")
        metrics = broker.metrics()
        for gauge in ("anabranch_loop_step_seconds_max", "anabranch_loop_step_processor_seconds_max"):
            [(told, longest)] = [it for it in metrics.items() if it[0].startswith(gauge)]
            assert told == f'{gauge}{{work="{name}"}}' and longest >= seconds
        for counter in ("anabranch_loop_slow_steps_total", "anabranch_loop_long_steps_total"):
            assert metrics[f'{counter}{{work="{name}"}}'] == 1
        assert broker.stop() == 0
        [line] = [it for it in broker.said("warning", SLOW_STEP) if it["ms"] >= seconds * 1000]
        assert line["work"] == name and line["processor_ms"] >= seconds * 1000
    finally:
        broker.kill()
