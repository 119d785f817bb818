"""The harness: sides in turn, medians, ratios, bars, and lines that say what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.__main__ import main, modules
from benchmarks.harness import Bar, Result, Round, Scale, compare, record


def scripted(calls: list[str], name: str, *values: float) -> Round:
    """A side that notes its calls and gives one value after the other."""
    left: Iterator[float] = iter(values)

    def measure() -> Mapping[str, float]:
        calls.append(name)
        return {"rate": next(left)}

    return measure


def result(ours: list[float], peer: list[float], bar: Bar) -> Result:
    return Result("test", "nothing", bar, {"ours": ours, "peer": peer}, small=False, environment={})


def test_each_side_is_warmed_and_then_they_take_turns_to_go_first() -> None:
    calls: list[str] = []
    sides = {"ours": scripted(calls, "ours", 1000, 1, 2, 30), "peer": scripted(calls, "peer", 1000, 2, 2, 2)}
    (found,) = compare("test", what="nothing", sides=sides, bars=[Bar("rate", "1/s", "more", 1.0)], scale=Scale(3))
    assert calls == ["ours", "peer", "ours", "peer", "peer", "ours", "ours", "peer"]
    assert found.sides == {"ours": [1, 2, 30], "peer": [2, 2, 2]}
    assert (found.medians, found.ratio, found.holds) == ({"ours": 2, "peer": 2}, 1.0, True)


@pytest.mark.parametrize(
    ("better", "bound", "ours", "holds"),
    [
        ("more", 3.0, 3.0, True),
        ("more", 3.0, 2.9, False),
        ("less", 0.3, 0.3, True),
        ("less", 0.3, 0.4, False),
        ("more", None, 0.0, None),
    ],
)
def test_a_bar_bounds_the_ratio(better: str, bound: float | None, ours: float, holds: bool | None) -> None:
    assert result([ours], [1.0], Bar("rate", "1/s", better, bound)).holds is holds  # type: ignore[arg-type]


def test_one_side_alone_is_measured_without_a_ratio() -> None:
    (found,) = compare(
        "test", what="x", sides={"ours": lambda: {"wait": 5.0}}, bars=[Bar("wait", "ms", "less")], scale=Scale(1)
    )
    assert (found.medians, found.ratio, found.holds) == ({"ours": 5.0}, None, None)


def test_a_line_says_what_was_measured_against_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = Bar("rate", "1/s", "more", 1.0)
    record("it", [result([1.0], [2.0], bar), result([9.0], [3.0], Bar("other", "s", "less", 2.0))], directory=tmp_path)
    record("it", [result([4.0], [2.0], bar)], directory=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "it.jsonl").read_text().splitlines()]
    assert [(line["figure"], line["ratio"], line["bar"], line["holds"]) for line in lines] == [
        ("other", 3.0, "<= 2x", False),
        ("rate", 2.0, ">= 1x", True),
    ]
    assert lines[1]["sides"] == {"ours": {"median": 4.0, "rounds": [4.0]}, "peer": {"median": 2.0, "rounds": [2.0]}}
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_small_results_are_not_kept_with_the_others(tmp_path: Path) -> None:
    small = Result("test", "x", Bar("rate", "1/s", "more"), {"ours": [1.0]}, small=True, environment={})
    record("it", [small], directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["it.local.jsonl"]


def test_every_benchmark_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, modules().values()))
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_a_benchmark_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["broker.nonsense"])
    assert ended.value.code == 2
