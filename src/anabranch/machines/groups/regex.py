"""Subscriptions by regular expression, with RE2: matching takes time in proportion to the text, whatever the pattern.

A pattern is bounded in length and in the memory of its automaton. What it matches is remembered, and with the next
image only the topics that differ are looked at. RE2 takes some microseconds for each name, so that the shell may have a
new pattern matched in steps (`match_some`) before a coordinator asks. The names that are remembered are bounded over
all patterns; those of the pattern that was used least recently are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import NamedTuple

from anabranch.base.patterns import compile_client_pattern
from anabranch.machines.groups.image import Image

REMEMBERED_MAX = 1_000
NAME_SIZE = 64
"""Memory for a name in the set of those that a pattern matches; the names themselves are the image's."""
NAMES_SIZE_MAX = 64 * 1024 * 1024


class _Matches(NamedTuple):
    """What a pattern matches in one version of the image."""

    version: int
    names: frozenset[str]


class Matching:
    """A pattern that is being matched in steps."""

    def __init__(self, pattern: str, image: Image) -> None:
        self.pattern = pattern
        self.image = image
        self.found: list[str] = []
        self.left: Iterator[str] = iter(image.by_name)


class Regexes:
    """Compiled patterns and their matches; a memo."""

    def __init__(
        self,
        length_max: int,
        names_size_max: int = NAMES_SIZE_MAX,
        alone: AbstractContextManager[object] = nullcontext(),
    ) -> None:
        """`names_size_max`: bytes for the names that all patterns match. `alone`: a lock, where threads share it."""
        self.names_size = 0
        """Bytes for the names that are remembered."""
        self._alone = alone
        """Held for the bookkeeping, and not while names are matched."""
        self._length_max = length_max
        self._names_size_max = names_size_max
        self._compiled: dict[str, Callable[[str], bool]] = {}
        self._matches: dict[str, _Matches] = {}
        """Those that were used least recently come first."""

    def check(self, pattern: str) -> None:
        """Raise INVALID_REGULAR_EXPRESSION, with the engine's reason, for an invalid pattern."""
        self._compile(pattern)

    def any_of(self, pattern: str, names: Collection[str]) -> bool:
        """Whether a pattern matches any of these names."""
        return bool(self._matched(pattern, names))

    def matches(self, pattern: str, image: Image) -> frozenset[str]:
        """The names that a pattern matches as a whole; internal topics, which begin with two underscores, never."""
        known = self._matches.get(pattern)
        differing = None if known is None else image.since(known.version)
        if known is None or differing is None:
            names = frozenset(self._matched(pattern, image.by_name))
        elif not differing:
            names = known.names
        else:
            fresh = self._matched(pattern, [name for name in differing if name in image.by_name])
            same = known.names.issuperset(fresh) and len(fresh) == len(known.names & differing)
            names = known.names if same else (known.names - differing).union(fresh)
        return self._remember(pattern, image, names)

    def begin(self, pattern: str, image: Image) -> Matching | None:
        """Begin to match a pattern in steps; None where that is not needed. ApiError as `check`."""
        self._compile(pattern)
        return None if pattern in self._matches else Matching(pattern, image)

    def match_some(self, matching: Matching, count: int) -> bool:
        """Match some names; whether others are left. At the end the pattern's matches are remembered."""
        names = list(islice(matching.left, count))
        matching.found += self._matched(matching.pattern, names)
        if names:
            return True
        if matching.pattern not in self._matches:
            self._remember(matching.pattern, matching.image, frozenset(matching.found))
        return False

    def _matched(self, pattern: str, names: Collection[str]) -> list[str]:
        matches = self._compile(pattern)
        return [name for name in names if not name.startswith("__") and matches(name)]

    def _remember(self, pattern: str, image: Image, names: frozenset[str]) -> frozenset[str]:
        with self._alone:
            before = self._matches.pop(pattern, None)
            self._matches[pattern] = _Matches(image.version, names)
            self.names_size += NAME_SIZE * (len(names) - (0 if before is None else len(before.names)))
            while len(self._matches) > REMEMBERED_MAX or (
                self.names_size > self._names_size_max and len(self._matches) > 1
            ):
                oldest = next(iter(self._matches))
                self.names_size -= NAME_SIZE * len(self._matches.pop(oldest).names)
        return names

    def _compile(self, pattern: str) -> Callable[[str], bool]:
        compiled = self._compiled.get(pattern)
        if compiled is not None:
            return compiled
        compiled = compile_client_pattern(pattern, self._length_max)
        with self._alone:
            if len(self._compiled) >= REMEMBERED_MAX:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[pattern] = compiled
        return compiled
