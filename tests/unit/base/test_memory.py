"""The memory of strings."""

from __future__ import annotations

import sys

import pytest

from anabranch.base.memory import text_size


@pytest.mark.parametrize("text", ["", "g", "x" * 1_000, "\xe9" * 1_000, "\u20ac" * 1_000, "x" * 1_000 + "\U0001f600"])
def test_a_string_takes_what_the_interpreter_says_beside_that_of_an_empty_one(text: str) -> None:
    assert text_size(text) == sys.getsizeof(text) - sys.getsizeof("")
    assert text_size(text) >= len(text) and (not text.isascii() or text_size(text) == len(text))


def test_no_string_takes_nothing() -> None:
    assert text_size(None) == text_size("") == 0
