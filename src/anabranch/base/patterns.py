"""Patterns of names: RE2 regular expressions that match a whole name, in time proportional to its length.

The one place that compiles them: RE2 writes nothing to standard error, and its reason for refusing a pattern is text.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.limits import PATTERN_LENGTH_MAX

MEMORY_MAX = 8 << 20
"""Bytes for the automaton of one pattern; RE2's own default."""
CLIENT_MEMORY_MAX = 1 << 20
"""Bytes for that of a client's pattern: with more, one of 600 characters is compiled and matched for 200 ms."""


def compile_client_pattern(pattern: str, length_max: int = PATTERN_LENGTH_MAX) -> Callable[[str], bool]:
    """As `compile_pattern`, for a pattern that a client sends: INVALID_REGULAR_EXPRESSION if it is too large, too."""
    if len(pattern) > length_max:
        message = f"The regular expression has {len(pattern)} characters; {length_max} are allowed."
        raise ApiError(ErrorCode.INVALID_REGULAR_EXPRESSION, message)
    return compile_pattern(pattern, memory_max=CLIENT_MEMORY_MAX)


def compile_pattern(pattern: str, *, memory_max: int = MEMORY_MAX) -> Callable[[str], bool]:
    """Return the test whether a whole name matches; ApiError INVALID_REGULAR_EXPRESSION with RE2's reason."""
    import re2  # 8 ms, and few processes need it

    options = re2.Options()
    options.log_errors = False
    options.max_mem = memory_max
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        message = f"'{pattern}' is not an RE2 regular expression: {text}"
        raise ApiError(ErrorCode.INVALID_REGULAR_EXPRESSION, message) from None
    return lambda name: compiled.fullmatch(name) is not None
