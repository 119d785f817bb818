"""Subscriptions by regular expression, with RE2: matching takes time in proportion to the text, whatever the pattern.

A pattern is bounded in length and in the memory of its automaton, so that none runs long; its matches are computed
once for each version of the metadata.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.patterns import compile_pattern
from anabranch.machines.groups.image import Image

MEMORY_MAX = 1 << 20
"""Bytes for a pattern's automaton."""
REMEMBERED_MAX = 1_000


class Regexes:
    """Compiled patterns and their matches; a memo."""

    def __init__(self, length_max: int) -> None:
        self._length_max = length_max
        self._compiled: dict[str, Callable[[str], bool]] = {}
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
            matches = self._compile(pattern)
            found = self._matches[pattern] = frozenset(
                name for name in image.by_name if not name.startswith("__") and matches(name)
            )
            if len(self._matches) > REMEMBERED_MAX:
                del self._matches[next(iter(self._matches))]
        return found

    def _compile(self, pattern: str) -> Callable[[str], bool]:
        compiled = self._compiled.get(pattern)
        if compiled is not None:
            return compiled
        if len(pattern) > self._length_max:
            raise ApiError(
                ErrorCode.INVALID_REGULAR_EXPRESSION,
                f"The regular expression has {len(pattern)} characters; {self._length_max} are allowed.",
            )
        compiled = compile_pattern(pattern, memory_max=MEMORY_MAX)
        if len(self._compiled) >= REMEMBERED_MAX:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[pattern] = compiled
        return compiled
