"""Subscriptions by RE2: what a pattern matches, what is refused, and that memory stays bounded."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.groups import regex
from anabranch.machines.groups.regex import Regexes
from tests.support.groups import topics


def test_a_pattern_matches_whole_names_and_no_internal_topic() -> None:
    image = topics(foo=1, foobar=1, bar=1, __consumer_offsets=1)
    assert Regexes(100).matches("foo", image) == {"foo"}
    assert Regexes(100).matches("foo.*", image) == {"foo", "foobar"}
    assert Regexes(100).matches(".*", image) == {"foo", "foobar", "bar"}


def test_new_topics_are_found_with_the_next_version_of_the_image() -> None:
    regexes = Regexes(100)
    assert regexes.matches("f.*", topics(1, foo=1)) == {"foo"}
    assert regexes.matches("f.*", topics(1, foo=1, fig=1)) == {"foo"}, "equal versions are equal images"
    assert regexes.matches("f.*", topics(2, foo=1, fig=1)) == {"foo", "fig"}


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(", "missing )"),
        ("(?=a)b", "(?="),
        ("x" * 101, "101 characters"),
        ("((a{100}){100}){10}", "RE2"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_engines_reason(
    pattern: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ApiError) as refused:
        Regexes(100).check(pattern)
    assert refused.value.code is ErrorCode.INVALID_REGULAR_EXPRESSION
    assert words in str(refused.value)
    assert capfd.readouterr().err == "", "the engine logs nothing of its own"


def test_memos_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex, "REMEMBERED_MAX", 3)
    regexes, image = Regexes(100), topics(t1=1, t2=1)
    for number in range(10):
        regexes.matches(f"t{number}", image)
    assert len(regexes._compiled) <= 3 and len(regexes._matches) <= 3
    assert regexes.matches("t1", image) == {"t1"}
