"""RE2 patterns: whole names, quiet refusal, bounded memory, and one place that compiles them."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.limits import PATTERN_LENGTH_MAX
from anabranch.base.patterns import compile_client_pattern, compile_pattern
from tests.support.broker import ROOT


def test_a_pattern_matches_whole_names() -> None:
    matches = compile_pattern("flights-.*|é+")
    assert [matches(name) for name in ("flights-1", "flights", "my-flights-1", "éé")] == [True, False, False, True]


@pytest.mark.parametrize(("pattern", "reason"), [("(", "missing )"), ("(?=a)b", "(?="), ("[z-a]", "z-a"), ("é(", ")")])
def test_a_refusal_has_the_reason_and_nothing_is_written_elsewhere(
    pattern: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ApiError) as refused:
        compile_pattern(pattern)
    assert refused.value.code is ErrorCode.INVALID_REGULAR_EXPRESSION
    assert refused.value.message.startswith(f"'{pattern}' is not an RE2 regular expression: ")
    assert reason in refused.value.message
    assert capfd.readouterr() == ("", "")


def test_memory_is_bounded() -> None:
    pattern = "((a|b|cc){30}){30}"
    assert compile_pattern(pattern, memory_max=64 << 20)("a" * 900)
    with pytest.raises(ApiError):
        compile_pattern(pattern, memory_max=1 << 16)


def test_a_pattern_of_a_client_is_short_and_its_automaton_small(capfd: pytest.CaptureFixture[str]) -> None:
    assert compile_client_pattern("a" * PATTERN_LENGTH_MAX)("a" * PATTERN_LENGTH_MAX)
    for pattern in ("[a-z]" * 600_000, "é" * (PATTERN_LENGTH_MAX + 1), r"(\pL|\pN)*" * 60):
        with pytest.raises(ApiError) as refused:
            compile_client_pattern(pattern)
        assert refused.value.code is ErrorCode.INVALID_REGULAR_EXPRESSION and len(refused.value.message) < 1_000
    assert capfd.readouterr() == ("", "")


def test_only_one_module_compiles_patterns() -> None:
    importing = [path for path in (ROOT / "src").rglob("*.py") if "import re2" in path.read_text(encoding="utf-8")]
    assert [path.relative_to(ROOT).as_posix() for path in importing] == ["src/anabranch/base/patterns.py"]
