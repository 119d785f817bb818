"""A checkout measured against another: here against itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.against import HERE


def test_both_checkouts_are_measured_and_every_figure_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["groups.uniform", "--against", str(HERE), "--rounds", "1", "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(
            r"groups\.uniform_equal \w+: \S+ against \S+, \S+x \((more|less) is better, [+-][\d.]+% worse\)", line
        )


def test_a_benchmark_that_fails_in_one_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=rf"groups\.uniform failed in {tmp_path}"):
        main(["groups.uniform", "--against", str(tmp_path), "--rounds", "1", "--small"])
