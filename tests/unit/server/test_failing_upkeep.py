"""Background work that fails, for one thing or as a whole, is logged and counted; the rest and the next round go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.records.batch import parse_header
from anabranch.runtime.chance import Chance
from anabranch.runtime.metrics import Metrics
from anabranch.server.broker import Broker
from anabranch.server.partitions import replicas, scrubbing
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.scrubbing import Scrubbing
from anabranch.server.settings import Settings
from anabranch.storage.log.log import LocalLog
from tests.support.replicas import NOW_MS, TOPIC, LocalReplicas
from tests.support.wire import batch

PRODUCER = (7, 0, 0)
DEFECT, FAULT = RuntimeError("a defect"), OSError("a fault")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalReplicas]:
    """Two partitions with a batch each."""
    made = LocalReplicas(tmp_path, durability="fsync", retention_ms="-1")
    made.resize(2)
    for number in range(2):
        data = batch([b"value"], producer=PRODUCER)
        made[number].append(data, parse_header(data), NOW_MS)
        made.sync(number)
    yield made
    made.close()


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(it.levelname, it.message) for it in caplog.records if it.levelname in ("WARNING", "ERROR")]


def test_a_defect_in_the_snapshot_of_one_log_keeps_no_other_from_its_own(
    local: LocalReplicas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = Partition.snapshot_beside

    async def fail_at_first(partition: Partition) -> None:
        if partition is local[0]:
            raise DEFECT
        await taken(partition)

    monkeypatch.setattr(replicas, "SNAPSHOT_INTERVAL_RECORDS", 1)
    monkeypatch.setattr(Partition, "snapshot_beside", fail_at_first)
    local.runner.run(local.replicas.maintain(1 << 40))
    assert [local[number].snapshot_end for number in range(2)] == [0, 1]
    assert said(caplog) == [("ERROR", "retention or producer snapshot failed")]
    assert local.metrics.counter("anabranch_upkeep_failures_total", "").value == 1


def test_a_defect_in_the_scrub_of_one_log_keeps_no_other_from_its_own(
    local: LocalReplicas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settled = scrubbing.scrub.settled

    def fail_at_first(log: LocalLog) -> Any:
        if log is local[0].log:
            raise DEFECT
        return settled(log)

    monkeypatch.setattr(scrubbing.scrub, "settled", fail_at_first)
    first = cast(Chance, SimpleNamespace(below=lambda _: 0))
    local.runner.run(Scrubbing(local.replicas, local.metrics, first, lambda: 1 << 30).run())
    counted = {it: local.metrics.counter(f"anabranch_scrub_{it}_total", "").value for it in ("failures", "passes")}
    assert counted == {"failures": 1, "passes": 1}
    assert local.metrics.counter("anabranch_scrub_bytes_total", "").value == local[1].log.size
    assert said(caplog) == [("ERROR", "log not scrubbed")]
    assert caplog.records[-1].__dict__["anabranch_fields"]["partition"] == (TOPIC, 0)


@pytest.mark.parametrize(("error", "level"), [(DEFECT, "ERROR"), (FAULT, "WARNING")])
def test_work_that_fails_ends_neither_the_work_behind_it_nor_the_next_round(
    error: Exception, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    broker = Broker(Settings())
    broker.context = SimpleNamespace(metrics=metrics)  # type: ignore[assignment]
    rounds = asyncio.Semaphore(0)

    async def failing() -> None:
        raise error

    async def behind() -> None:
        rounds.release()

    async def run(every: Callable[..., Awaitable[None]]) -> None:
        upkeep = asyncio.ensure_future(every(1, failing, behind))
        turns = asyncio.gather(rounds.acquire(), rounds.acquire())
        await asyncio.wait({upkeep, turns}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert turns.done() and not upkeep.done()
        upkeep.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await upkeep

    asyncio.run(run(broker._every))
    assert said(caplog)[:2] == [(level, "upkeep failed")] * 2
    assert metrics.counter("anabranch_upkeep_works_failed_total", "", work=failing.__qualname__).value >= 2
