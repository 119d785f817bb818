"""The wire types of the Kafka protocol, and the field functions with which a message is declared.

A field is its type, its range of versions, the versions in which it may be null, and its tag. A
tagged field exists in flexible versions only. Every field has a default: the value it has when a version lacks it, and
for a tagged field the value that is not written at all. A tagged struct defaults to None, "not said".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias
from uuid import UUID

from anabranch.base.ids import NO_TOPIC_ID

NEVER = 1 << 15
"""Above every version: versions are 16-bit on the wire."""
NIL = NO_TOPIC_ID

Blob: TypeAlias = bytes | bytearray | memoryview
"""The value of a `bytes_` field: a view of the decoded buffer on read, any of these on write."""
Records: TypeAlias = Any
"""The value of a `records` field: a view on read; on write a blob or any sized object, passed through."""


class Pieces:
    """The value of a `records` field on write that is not in one piece."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: Sequence[Sized]) -> None:
        self.parts = parts
        self.size = sum(map(len, parts))

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class Fixed:
    """A number or boolean of fixed width: `code` is its letter in a `struct` format."""

    code: str
    size: int


@dataclass(frozen=True, slots=True)
class Uuid:
    """Sixteen bytes, big-endian; the nil UUID means "none"."""


@dataclass(frozen=True, slots=True)
class String:
    """UTF-8 text behind its length: int16, in flexible versions an unsigned varint of length + 1.

    At most `STRING_SIZE_MAX` bytes are read of a request or response.
    """


@dataclass(frozen=True, slots=True)
class Bytes:
    """Raw bytes behind their length: int32, in flexible versions an unsigned varint of length + 1."""

    passes_through: bool = False
    """Whether `encode` accepts any sized object instead: record batches."""


@dataclass(frozen=True, slots=True)
class Array:
    """Values behind their count: int32, in flexible versions an unsigned varint of count + 1."""

    of: Type


@dataclass(frozen=True, slots=True)
class Nested:
    """A struct in place; where it may be null, behind an int8 that is negative for null."""

    of: type


Type: TypeAlias = Fixed | Uuid | String | Bytes | Array | Nested


@dataclass(frozen=True, slots=True)
class Versions:
    """An inclusive range of versions, written "0-4", "3", "2+", or "none"."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Versions:
        """Read the notation of Kafka's message definitions."""
        if text == "none":
            return cls(NEVER, -1)
        if text.endswith("+"):
            return cls(int(text[:-1]), NEVER)
        first, _, last = text.partition("-")
        return cls(int(first), int(last or first))

    def __contains__(self, version: int) -> bool:
        return self.first <= version <= self.last


ALWAYS = Versions(0, NEVER)
NOWHERE = Versions.parse("none")


@dataclass(frozen=True, slots=True)
class Field:
    """One declared field, before it has a name."""

    type: Type
    versions: Versions
    nullable: Versions
    default: Any
    tag: int | None

    def exists(self, version: int, flexible: bool) -> bool:
        """Whether messages of this version carry the field."""
        return version in self.versions and (flexible or self.tag is None)


def _field(kind: Type, default: Any, since: int, until: int, nullable: bool | str, tag: int | None) -> Any:
    nulls = Versions.parse(nullable) if isinstance(nullable, str) else ALWAYS if nullable else NOWHERE
    return Field(kind, Versions(since, until), nulls, default, tag)


def _fixed(code: str, size: int, zero: Any) -> Callable[..., Any]:
    kind = Fixed(code, size)

    def declare(*, since: int = 0, until: int = NEVER, default: Any = zero, tag: int | None = None) -> Any:
        return Field(kind, Versions(since, until), NOWHERE, default, tag)

    return declare


int8 = _fixed("b", 1, 0)
int16 = _fixed("h", 2, 0)
int32 = _fixed("i", 4, 0)
int64 = _fixed("q", 8, 0)
uint16 = _fixed("H", 2, 0)
uint32 = _fixed("I", 4, 0)
float64 = _fixed("d", 8, 0.0)
boolean = _fixed("?", 1, False)


def uuid(*, since: int = 0, until: int = NEVER, default: UUID = NIL, tag: int | None = None) -> Any:
    """Declare a UUID."""
    return _field(Uuid(), default, since, until, False, tag)


def string(
    *,
    since: int = 0,
    until: int = NEVER,
    nullable: bool | str = False,
    default: str | None = "",
    tag: int | None = None,
) -> Any:
    """Declare a string; `nullable` is the versions in which it may be null, or True for all."""
    return _field(String(), default, since, until, nullable, tag)


def bytes_(
    *,
    since: int = 0,
    until: int = NEVER,
    nullable: bool | str = False,
    default: bytes | None = b"",
    tag: int | None = None,
) -> Any:
    """Declare raw bytes: a view of the decoded buffer on read."""
    return _field(Bytes(), default, since, until, nullable, tag)


def records(*, since: int = 0, until: int = NEVER, nullable: bool | str = False, default: bytes | None = None) -> Any:
    """Declare record batches: a view of the decoded buffer on read; on write they are passed through uncopied."""
    return _field(Bytes(passes_through=True), default, since, until, nullable, None)


def array(
    of: Callable[..., Any] | type,
    *,
    since: int = 0,
    until: int = NEVER,
    nullable: bool | str = False,
    default: tuple[()] | None = (),
    tag: int | None = None,
) -> Any:
    """Declare an array of a struct class or of a field function: `array(FetchTopic)`, `array(int32)`."""
    element: Type = Nested(of) if isinstance(of, type) else of().type
    return _field(Array(element), default, since, until, nullable, tag)


def nested(
    of: type,
    *,
    since: int = 0,
    until: int = NEVER,
    nullable: bool | str = False,
    tag: int | None = None,
) -> Any:
    """Declare a struct in place. Where it is nullable or tagged its default is None, else the struct of defaults."""
    optional = nullable is not False or tag is not None
    return _field(Nested(of), None if optional else of, since, until, nullable, tag)
