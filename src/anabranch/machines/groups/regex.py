"""Subscriptions by regular expression, with RE2: matching takes time in proportion to the text, whatever the pattern.

A pattern is bounded in length and in the memory of its automaton, so that none runs long; its matches are computed
once for each version of the metadata.
"""

from __future__ import annotations

from typing import Any

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.groups.image import Image

MEMORY_MAX = 1 << 20
"""Bytes for a pattern's automaton."""
REMEMBERED_MAX = 1_000


class Regexes:
    """Compiled patterns and their matches; a memo."""

    def __init__(self, length_max: int) -> None:
        self._length_max = length_max
        self._compiled: dict[str, Any] = {}
        self._matches: dict[str, frozenset[str]] = {}
        self._version = -1

    def check(self, pattern: str) -> None:
        """Raise INVALID_REGULAR_EXPRESSION, with the engine's reason, for an invalid pattern."""
        self._compile(pattern)

    def matches(self, pattern: str, image: Image) -> frozenset[str]:
        """The names that a pattern matches as a whole; internal topics, which begin with two underscores, never."""
        if image.version != self._version:
            self._matches.clear()
            self._version = image.version
        found = self._matches.get(pattern)
        if found is None:
            compiled = self._compile(pattern)
            found = self._matches[pattern] = frozenset(
                name for name in image.by_name if not name.startswith("__") and compiled.fullmatch(name)
            )
            if len(self._matches) > REMEMBERED_MAX:
                del self._matches[next(iter(self._matches))]
        return found

    def _compile(self, pattern: str) -> Any:
        compiled = self._compiled.get(pattern)
        if compiled is not None:
            return compiled
        if len(pattern) > self._length_max:
            raise ApiError(
                ErrorCode.INVALID_REGULAR_EXPRESSION,
                f"The regular expression has {len(pattern)} characters; {self._length_max} are allowed.",
            )
        import re2

        options = re2.Options()
        options.log_errors = False
        options.max_mem = MEMORY_MAX
        try:
            compiled = re2.compile(pattern, options=options)
        except re2.error as error:
            reason = error.args[0] if error.args else error
            reason = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
            raise ApiError(
                ErrorCode.INVALID_REGULAR_EXPRESSION, f"'{pattern}' is not a regular expression of RE2: {reason}"
            ) from None
        if len(self._compiled) >= REMEMBERED_MAX:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[pattern] = compiled
        return compiled
