"""Subscriptions by RE2: what a pattern matches, what is refused, and that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.patterns import compile_client_pattern
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


def test_after_a_change_only_the_topics_that_differ_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def compiled(pattern: str, length_max: int) -> Callable[[str], bool]:
        matches = compile_client_pattern(pattern, length_max)
        return lambda name: looked_at.append(name) or matches(name)  # type: ignore[func-returns-value]

    monkeypatch.setattr(regex, "compile_client_pattern", compiled)
    regexes, image = Regexes(100), topics(fig=1, foo=1, bar=1)
    assert regexes.matches("f.*", image) == {"fig", "foo"}
    fresh = topics(fur=1).by_name["fur"]
    looked_at.clear()
    grown = image.next({"fur": fresh})
    assert regexes.matches("f.*", grown) == {"fig", "foo", "fur"}
    assert looked_at == ["fur"]
    shrunk = grown.next({"foo": None, "bar": None})
    assert regexes.matches("f.*", shrunk) == {"fig", "fur"}
    assert looked_at == ["fur"]
    assert regexes.matches("f.*", grown) == {"fig", "foo", "fur"}, "an image from before"


def test_a_pattern_is_matched_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    regexes, image = Regexes(100), topics(**{f"t{number}": 1 for number in range(10)})
    matching = regexes.begin("t[0-4]", image)
    assert matching is not None
    steps = 1
    while regexes.match_some(matching, 3):
        steps += 1
    assert steps == 5
    monkeypatch.setattr(regex.Regexes, "_matched", lambda *_: pytest.fail("it is matched already"))
    assert regexes.begin("t[0-4]", image) is None
    assert regexes.matches("t[0-4]", image) == {f"t{number}" for number in range(5)}


def test_the_names_that_are_remembered_are_bounded() -> None:
    image = topics(**{f"t{number}": 1 for number in range(100)})
    regexes = Regexes(100, names_size_max=250 * regex.NAME_SIZE)
    for number in range(10):
        assert len(regexes.matches(f"t.*|{number}", image)) == 100
        assert regexes.names_size == min(number + 1, 2) * 100 * regex.NAME_SIZE
    assert regexes.begin("t.*|8", image) is None
    assert regexes.begin("t.*|7", image) is not None, "the one that was used least recently is forgotten"
    assert len(regexes.matches("t.*|8", image.next(dict.fromkeys(image.by_name)))) == 0
    assert regexes.names_size == 100 * regex.NAME_SIZE


def test_memos_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex, "REMEMBERED_MAX", 3)
    regexes, image = Regexes(100), topics(t1=1, t2=1)
    for number in range(10):
        regexes.matches(f"t{number}", image)
    assert len(regexes._compiled) <= 3 and len(regexes._matches) <= 3
    assert regexes.matches("t1", image) == {"t1"}
