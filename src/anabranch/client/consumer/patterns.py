"""RE2 patterns of topic names, matched as a whole, without saying anything on standard error."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.base.errors import ApiError, ErrorCode


def compiled(pattern: str) -> Callable[[str], bool]:
    """A test for names; raises `ApiError` INVALID_REGULAR_EXPRESSION for what is no RE2 regular expression."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        matcher = re2.compile(pattern, options)
    except re2.error as error:
        said = error.args[0] if error.args else error
        text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        message = f"'{pattern}' is not an RE2 regular expression: {text}"
        raise ApiError(ErrorCode.INVALID_REGULAR_EXPRESSION, message) from None
    return lambda name: matcher.fullmatch(name) is not None
