"""The cleaner keeps its own time: it waits for no retention, and its settings change while the broker runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client import AnabranchError, sync
from tests.support.broker import BrokerProcess, log_size, running
from tests.support.wire import WireClient, batch

BACKOFF = "log.cleaner.backoff.ms"


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_idle_topic_is_compacted_when_its_records_have_waited_long_enough(tmp_path: Path) -> None:
    """Its one segment takes appends still, and retention does not come for five minutes."""
    with running(tmp_path, log_cleaner_backoff_ms=60_000, log_cleaner_max_compaction_lag_ms=1_000) as broker:
        now_ms = time.time_ns() // 1_000_000
        with WireClient(broker.port) as client, sync.Admin(broker.address) as admin:
            client.create("t", cleanup_policy="compact")
            client.create("u", cleanup_policy="compact", max_compaction_lag_ms="3600000")
            for topic in ("t", "u"):
                for number in range(50):
                    produced = client.produce(topic, 0, batch([b"%0100d" % number], key=b"k", timestamp=now_ms))
                    assert produced.error_code == ErrorCode.NONE
            before = log_size(tmp_path / "t-0")
            with pytest.raises(AnabranchError, match="must be a whole number"):
                admin.alter_configs("broker", "1", {BACKOFF: "9"})
            admin.alter_configs("broker", "1", {BACKOFF: "50"})
            assert admin.describe_configs("broker", "1")[BACKOFF].value == "50"
            until(lambda: log_size(tmp_path / "t-0") < before / 20)
            assert log_size(tmp_path / "u-0") == before
            assert client.read_all("t") == [(49, b"%0100d" % 49)]
            assert client.produce("t", 0, batch([b"new"], key=b"k", timestamp=now_ms)).base_offset == 50
            assert client.read_all("t", start=50) == [(50, b"new")]


def test_a_backoff_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, log_cleaner_backoff_ms=1)
    broker.start(expect_ready=False)
    assert broker.wait() == 2
