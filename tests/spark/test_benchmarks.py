"""The benchmarks of the Spark source and sink, small, beside Spark's own for Kafka: in a JVM that has its connector."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.broker import ROOT
from tests.support.thorough import THOROUGH

MEASURED = """
import sys
from benchmarks.__main__ import modules
from benchmarks.harness import Scale
for benchmark in modules()[sys.argv[1]].values():
    for result in benchmark(Scale(rounds=1, small=True)):
        print(result.line(), flush=True)
"""


@pytest.mark.skipif(not THOROUGH, reason="twelve Spark sessions: make conformance")
@pytest.mark.parametrize(
    ("module", "figures"), [("spark", 2), ("spark_kafka", 7), ("spark_elastic", 4), ("keyed", 2)], ids=str
)
def test_the_data_pipeline_is_measured_side_by_side(module: str, figures: int) -> None:
    command = [sys.executable, "-c", MEASURED, module]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == figures
    assert all(result["ratio"] is not None and result["ratio"] > 0 for result in results)
