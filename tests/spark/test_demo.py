"""The main job, small: flights through three resizes, read by Spark, compared with a plain pass over the file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.demo.flights import Result, single_pass
from tests.support.broker import ROOT


def test_the_plain_pass_on_flights_that_one_can_check_by_eye() -> None:
    departures = [("a", 20.0), ("b", 0.0), ("a", 30.0), (None, 99.0), ("a", None), ("a", 5.0), ("a", 16.0), ("b", -3.0)]
    assert single_pass(departures) == {"a": Result(4, 2, 11.0), "b": Result(2, 0, 0.0)}


@pytest.mark.timeout(300)
def test_the_demo_finds_no_difference_and_draws_what_happened(tmp_path: Path) -> None:
    picture = tmp_path / "report.html"
    without_display = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    options = ["--rows", "20000", "--no-contrast", "--json", "--report", str(picture)]
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.cli", "demo", *options],
        capture_output=True,
        text=True,
        env={**without_display, "PYTHONPATH": str(ROOT / "src")},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARN" not in done.stderr.upper()
    report = json.loads(done.stdout)
    (run,) = report["runs"]
    assert (run["rows"], run["differences"]) == (20_000, 0)
    assert [(step["from"], step["to"]) for step in run["resizes"]] == [(2, 6), (6, 3), (3, 8)]
    assert report["aircraft"] > 1_000
    page = picture.read_text(encoding="utf-8")
    assert f"<b>0 of {report['aircraft']:,}</b>" in page and f"{run['rows']:,} records" in page
    assert all(f"{old} → {new} partitions" in page for old, new in [(2, 6), (6, 3), (3, 8)])
    assert "micro-batch 0: " in page and page.count("<svg ") == 2
    assert all(f"partition 0 in layout {layout} " in page for layout in (0, 3)), "a layout without records"
    assert set(re.findall(r"[a-z]+://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}, "it needs the network"
