"""Values of settings: how their text is read and written, and the kinds that DescribeConfigs names.

A parser takes a text and returns a value, or raises ValueError with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, or where to be found."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read `HOST:PORT`, `PLAINTEXT://HOST:PORT` or `PLAINTEXT://:PORT`."""
    scheme, separator, rest = text.strip().rpartition("://")
    if separator and scheme.upper() != "PLAINTEXT":
        raise ValueError(f"{scheme}:// is not supported, only PLAINTEXT://")
    host, colon, port = rest.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected HOST:PORT")
    return Address(host.strip("[]"), int(port))


def parse_int(text: str) -> int:
    """Read a whole number, with `_` between digits or without."""
    try:
        return int(text.strip().replace("_", ""))
    except ValueError:
        raise ValueError("expected a whole number") from None


def parse_ratio(text: str) -> float:
    """Read a number from 0 to 1."""
    ratio = float(text)
    if not 0.0 <= ratio <= 1.0:
        raise ValueError("expected a number from 0 to 1")
    return ratio


def parse_bool(text: str) -> bool:
    """Read `true` or `false`, in upper or lower case."""
    lowered = text.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError("expected true or false")
    return lowered == "true"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words, in upper or lower case; the value is spelt as it is here."""

    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        for word in self.words:
            if word.lower() == text.strip().lower():
                return word
        raise ValueError(f"expected one of {', '.join(self.words)}")


@dataclass(frozen=True, slots=True)
class Words:
    """Several of a few words, separated by commas."""

    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        chosen = [word.strip().lower() for word in text.split(",")]
        if not chosen or any(word not in self.words for word in chosen):
            raise ValueError(f"expected some of {', '.join(self.words)}")
        return ",".join(chosen)


@dataclass(frozen=True, slots=True)
class Between:
    """A whole number with bounds, both inclusive."""

    low: int
    high: int

    def __call__(self, text: str) -> int:
        number = parse_int(text)
        if not self.low <= number <= self.high:
            raise ValueError(f"expected {self.low} to {self.high}")
        return number


def parse_path(text: str) -> Path:
    """Read one directory; `~` is the home of the user."""
    if not text.strip():
        raise ValueError("expected a directory")
    if "," in text:
        raise ValueError("expected one directory: a broker keeps all its data in one place")
    return Path(text.strip()).expanduser()


def parse_names(text: str) -> str:
    """Read names, separated by commas, each once."""
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError("expected names, separated by commas, each once")
    return ",".join(names)


def parse_optional_address(text: str) -> Address | None:
    """Read an address, or None from an empty text."""
    return parse_address(text) if text.strip() else None


Parser = Callable[[str], object]


def setting(name: str, parse: Parser, default: object, doc: str, *, kind: str = "") -> Any:
    """Declare a setting: its Kafka name, how its text is read, its default, one sentence about it."""
    return field(default=default, metadata={"name": name, "parse": parse, "doc": doc, "kind": kind or _kind(parse)})


def _kind(parse: Parser) -> str:
    if parse is parse_bool:
        return "boolean"
    if parse is parse_ratio:
        return "double"
    if isinstance(parse, Between):
        return "int" if parse.high <= INT32_MAX else "long"
    if isinstance(parse, Words):
        return "list"
    return "string"


def as_text(value: object) -> str:
    """Write a value the way it is read."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
