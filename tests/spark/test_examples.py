"""The Spark examples run with one command, say that their result is right, and draw it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broker import ROOT
from tests.support.thorough import THOROUGH

EXAMPLES = ["change_data_capture", "aircraft", "payments", "declarative_pipeline"]


@pytest.mark.skipif(not THOROUGH, reason="a broker and a Spark session for each: make conformance")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_right_and_draws_its_result(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    if name == "declarative_pipeline":
        pytest.importorskip("grpc")
    picture = tmp_path / "result.png"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", "--quick", "--picture", str(picture)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"The result is right; the picture is in {picture}" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.skipif(not THOROUGH, reason="a Spark session of its own: make conformance")
@pytest.mark.timeout(900)
def test_the_benchmark_of_keyed_state_runs_small() -> None:
    """Each of its rounds checks the results of `keyed` and of Spark's own operator."""
    command = [sys.executable, "-m", "benchmarks", "keyed.many_keys", "--small", "--alone", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=840, check=False)
    assert done.returncode == 0 and "rows_per_s" in done.stdout, done.stderr[-3000:]
