"""The broker's benchmarks run: small, without a bar, against Apache Kafka as they do when they are large."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.broker import (
    Pair,
    both,
    consume,
    consume_librdkafka,
    durable,
    latency,
    produce,
    produce_librdkafka,
    resize,
    resize_under_load,
)
from benchmarks.coordinator import heartbeats
from benchmarks.harness import Result, Scale
from tests.support.thorough import THOROUGH

SMALL = Scale(rounds=1, small=True)
MEASURED = [produce, consume, durable]
MEASURED += [produce_librdkafka, consume_librdkafka, latency, heartbeats] if THOROUGH else []


@pytest.fixture(scope="module")
def running() -> Iterator[Pair]:
    with both({}, {}, Scale(small=True)) as servers:
        yield servers


@pytest.mark.parametrize("benchmark", MEASURED)
def test_both_brokers_are_measured(benchmark: Callable[[Scale, Pair], list[Result]], running: Pair) -> None:
    for result in benchmark(SMALL, running):
        assert set(result.sides) == {"anabranch", "apache-kafka"}
        assert result.what and result.small
        if not result.bar.figure.startswith("cpu"):
            assert min(result.medians.values()) > 0


def test_a_broker_that_serves_is_measured(running: Pair) -> None:
    for server in running.values():
        assert server.running and server.started_in_s > 0
        assert server.usage().resident_bytes > 10 << 20
        assert server.usage().cpu_s > 0
    assert running["anabranch"].usage().resident_bytes < running["apache-kafka"].usage().resident_bytes


def test_a_resize_under_load_loses_doubles_and_disorders_nothing() -> None:
    found = {result.bar.figure: result.medians["anabranch"] for result in resize(SMALL)}
    assert found["longest_wait_ms"] > 0
    assert (found["lost"], found["doubled"], found["out_of_order"]) == (0, 0, 0)


def test_a_growth_under_load_is_measured_and_loses_nothing() -> None:
    found = {result.bar.figure: result.medians["anabranch"] for result in resize_under_load(SMALL)}
    assert found["longest_wait_ms"] > 0 and found["bytes_per_s"] > 1e6
    assert found["lost"] == 0
