"""The values that configs accept, as text; a valid one, a list in its plain form, is short whatever a client sends."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.base.ids import is_whole

NUMBER_LENGTH_MAX = 20
"""Characters of a number with a fraction."""
Validator = Callable[[str], str | None]
"""The requirement that a value violates; None for a valid value."""


def whole(least: int, most: int) -> Validator:
    """Accept a whole number from `least` to `most`."""

    def check(value: str) -> str | None:
        wanted = f"a whole number from {least} to {most}"
        digits = value.removeprefix("-")
        if not (is_whole(digits) and len(digits) <= 19):
            return wanted
        return None if least <= int(value) <= most else wanted

    return check


def ratio(value: str) -> str | None:
    """Accept a number from 0 to 1."""
    if len(value) > NUMBER_LENGTH_MAX:
        return f"a number from 0 to 1 of at most {NUMBER_LENGTH_MAX} characters"
    try:
        return None if 0.0 <= float(value) <= 1.0 else "a number from 0 to 1"
    except ValueError:
        return "a number from 0 to 1"


def one_of(*choices: str) -> Validator:
    """Accept one of some words."""

    def check(value: str) -> str | None:
        return None if value in choices else "one of " + ", ".join(choices)

    return check


def several_of(*choices: str) -> Validator:
    """Accept a list of some words, each of them once."""

    def check(value: str) -> str | None:
        items = split(value)
        known = items and len(set(items)) == len(items) and set(items) <= set(choices)
        return None if known else "one or more of " + ", ".join(choices)

    return check


def boolean(value: str) -> str | None:
    """Accept true and false, in any case."""
    return None if value.lower() in ("true", "false") else "true or false"


def split(value: str) -> list[str]:
    """The items of a config that is a list."""
    return [item.strip() for item in value.split(",") if item.strip()]


def plain(value: str) -> str:
    """A config that is a list, without blanks and empty items."""
    return ",".join(split(value))
