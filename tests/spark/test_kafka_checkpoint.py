"""A query of Spark's own Kafka source, with state, goes on with ours where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.flow import Flow
from tests.support.broker import ROOT, running
from tests.support.thorough import THOROUGH


@pytest.mark.skipif(not THOROUGH, reason="two drivers: make conformance; test_source.py has the short form")
@pytest.mark.timeout(600)
def test_a_stateful_query_of_the_kafka_source_is_taken_over(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=280, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def counts(checkpoint: Path, format_: str) -> dict[str, int]:
        result = tmp_path / "counts"
        run("tests.spark.kafka_driver", flow.address, flow.topic, str(checkpoint), format_, str(result))
        found: dict[str, int] = json.loads(result.read_text())
        return found

    with running(tmp_path / "broker") as broker:
        flow = Flow(broker.address, "taken-over")
        flow.send(1_000)
        flow.resize(5)
        flow.send(1_000)
        old, new = tmp_path / "old", tmp_path / "new"
        assert counts(old, "kafka") == {key: len(values) for key, values in flow.expected().items()}
        told = run("anabranch.cli", "convert-checkpoint", str(old), str(new), "-b", broker.address)
        assert told == "Converted taken-over; micro-batches: 1.\n"
        flow.send(1_000)
        flow.resize(2)
        flow.send(1_000)
        assert counts(new, "anabranch") == {key: len(values) for key, values in flow.expected().items()}
        flow.close()
