"""The broker's own metrics of a host of partitions: read in steps, whether they have a sample or not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.controller.views import ResizeWait
from anabranch.runtime.metrics import SAMPLES_PER_STEP, Metrics, Sample
from anabranch.server.broker import Broker
from anabranch.server.cluster.resize_waits import Found, ResizeWaits
from anabranch.server.settings import Settings

COUNT = 5 * SAMPLES_PER_STEP
WAITING = "anabranch_controller_resize_waiting_seconds"


class Host:
    """Partitions without records, and resizes that wait for each; it counts how often one is looked at."""

    def __init__(self) -> None:
        self.looked = 0
        self.waits = ResizeWaits(lambda: 0)
        waits = [ResizeWait(number, 1, ErrorCode.KAFKA_STORAGE_ERROR) for number in range(COUNT)]
        self.waits.note(ControllerState(), {"t": Found(self.waits.compare({"t": waits})["t"].waiting, [])})

    def __iter__(self) -> Iterator[Any]:
        for number in range(COUNT):
            self.looked += 1
            name = TopicPartition("t", number)
            yield SimpleNamespace(name=name, offline_reason=None, retiring=number < 3, log=SimpleNamespace(end=0))

    def all(self) -> Iterator[Any]:
        for each in self.waits.all():
            self.looked += 1
            yield each


def read(name: str) -> tuple[list[Sample], int]:
    """Read one metric; its samples, and the most things that were looked at in a step."""
    host, metrics = Host(), Metrics()
    broker = Broker(Settings())
    nothing = SimpleNamespace(describe_in=lambda _: None)
    broker.context = SimpleNamespace(metrics=metrics, replicas=host, fetches=nothing, checks=nothing)  # type: ignore[assignment]
    host.files = {}  # type: ignore[attr-defined]
    broker._controller = SimpleNamespace(waits=host)  # type: ignore[assignment]
    broker._describe_in_metrics()
    metrics._gauges = {name: metrics._gauges[name]}
    most = 0

    async def run() -> list[Sample]:
        nonlocal most
        reading = asyncio.create_task(metrics.families())
        while not reading.done():
            before = host.looked
            await asyncio.sleep(0)
            most = max(most, host.looked - before)
        return [*reading.result()[0].samples]

    return asyncio.run(run()), most


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("kafka_server_replicamanager_offlinereplicacount", [({}, 0.0)]),
        ("anabranch_retiring_partitions", [({}, 3.0)]),
        ("kafka_log_log_size_bytes", []),
        ("kafka_log_log_logstartoffset", []),
        ("kafka_log_log_logendoffset", []),
    ],
)
def test_partitions_without_a_sample_are_part_of_a_step(name: str, samples: list[Sample]) -> None:
    assert read(name) == (samples, SAMPLES_PER_STEP)


def test_partitions_that_hold_resizes_up_are_read_in_steps() -> None:
    found, most = read(WAITING)
    assert len(found) == COUNT and most == SAMPLES_PER_STEP


def test_of_many_partitions_that_begin_to_hold_a_resize_up_few_have_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A line for each of 100,000 took seconds of the event loop."""
    topic = SimpleNamespace(undeleted_partition_count=COUNT, resize=None)
    state = ControllerState()
    state.topics["t"] = topic  # type: ignore[assignment]
    now_ms = 5
    caplog.set_level("INFO", "anabranch")
    waits = ResizeWaits(lambda: now_ms)
    failing = [ResizeWait(number, 1, ErrorCode.KAFKA_STORAGE_ERROR) for number in reversed(range(COUNT))]
    waits.note(state, waits.compare({"t": failing}))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["resize waits for a partition"] * 20 + ["resize waits for more partitions"]
    assert [it.wait.partition for it in waits.of("t")] == [*range(COUNT)]
    caplog.clear()
    now_ms = 9
    waits.note(state, waits.compare({"t": failing}))
    assert not caplog.records and {it.since_ms for it in waits.of("t")} == {5}
    waits.note(state, waits.compare({"t": [failing[0]._replace(error=ErrorCode.REQUEST_TIMED_OUT)]}))
    assert [(it.wait.error, it.since_ms) for it in waits.of("t")] == [(ErrorCode.REQUEST_TIMED_OUT, 5)]
    waits.note(state, waits.compare({"t": []}))
    assert [record.getMessage() for record in caplog.records] == [
        "resize waits for a partition",
        "resize waits no more",
    ]
    assert [*waits.all()] == []
