"""Encode and decode: look up, or compile on first use, the reader and writer of a class and version.

Any bytes give a message or a `DecodeError`. Decoding copies no `bytes_` or `records` field: they are views that keep
the buffer alive, so a buffer that is to be reused must outlive them.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias, TypeVar

from anabranch.base.errors import DecodeError
from anabranch.base.limits import ARRAY_LENGTH_MAX
from anabranch.codec.declaration import schema_of
from anabranch.codec.primitives import EncodeError
from anabranch.codec.reading import MALFORMED, Reader, compile_reader
from anabranch.codec.types import Blob, Pieces
from anabranch.codec.writing import Splice, Writer, compile_writer

T = TypeVar("T")

Part: TypeAlias = Any
"""A piece of an encoded message: a blob, or the sized object in a `records` field."""

_readers: dict[tuple[type, int], Reader] = {}
_writers: dict[tuple[type, int], Writer] = {}


def decode(declared: type[T], buffer: Blob, version: int) -> T:
    """Read a whole buffer as one message; bytes left over are an error."""
    made, position = decode_prefix(declared, buffer, version)
    if position != len(buffer):
        raise DecodeError(f"{declared.__name__} version {version}: {len(buffer) - position} bytes left over")
    return made


def decode_prefix(
    declared: type[T], buffer: Blob, version: int, position: int = 0, elements_max: int = ARRAY_LENGTH_MAX
) -> tuple[T, int]:
    """Read a message that begins at `position`: the message, and the position after it.

    Array elements and tagged fields that are not declared are counted together, before anything is made of them.
    """
    reader = _readers.get((declared, version)) or _reader(declared, version)
    view = buffer if type(buffer) is memoryview else memoryview(buffer)
    try:
        made, position, _ = reader(view, position, elements_max)
    except MALFORMED as error:
        raise DecodeError(f"{declared.__name__} version {version}: {_reason(error)}") from None
    return made, position


def encode(message: object, version: int) -> list[Part]:
    """Write a message as parts to be sent in order; large or foreign records are parts of their own, uncopied."""
    out = bytearray()
    splices: list[Splice] = []
    encode_into(message, version, out, splices)
    return spliced(out, splices)


def encode_into(message: object, version: int, out: bytearray, splices: list[Splice]) -> None:
    """Append a message to `out`, and to `splices` (position in `out`, part) for every part that is not copied."""
    declared = type(message)
    writer = _writers.get((declared, version)) or _writer(declared, version)
    try:
        writer(message, out, splices)
    except (struct.error, TypeError, AttributeError, UnicodeEncodeError) as error:
        raise EncodeError(f"{declared.__name__} version {version} cannot carry what it was given: {error}") from error


def prepare(*declared: type, version: int | None = None) -> None:
    """Compile readers and writers of messages in a version, or their newest: each takes 1 to 5 ms, in a thread."""
    for message in declared:
        chosen = schema_of(message).versions.last if version is None else version
        _reader(message, chosen)
        _writer(message, chosen)


def spliced(out: bytearray, splices: list[Splice]) -> list[Part]:
    """Cut `out` where parts belong between its bytes."""
    if not splices:
        return [out]
    parts: list[Part] = []
    view = memoryview(out)
    start = 0
    for position, part in splices:
        if position > start:
            parts.append(view[start:position])
        if isinstance(part, Pieces):
            parts.extend(part.parts)
        else:
            parts.append(part)
        start = position
    if start < len(out):
        parts.append(view[start:])
    return parts


def encoded_size(message: object, version: int) -> int:
    """How many bytes the message takes."""
    out = bytearray()
    splices: list[Splice] = []
    encode_into(message, version, out, splices)
    return len(out) + sum(len(part) for _, part in splices)


def _reason(error: Exception) -> str:
    return "text is not UTF-8" if isinstance(error, UnicodeDecodeError) else "the bytes end too early"


def _reader(declared: type, version: int) -> Reader:
    if version not in schema_of(declared).versions:
        raise DecodeError(f"{declared.__name__} has no version {version}")
    reader = _readers[declared, version] = compile_reader(declared, version)
    return reader


def _writer(declared: type[Any], version: int) -> Writer:
    if version not in schema_of(declared).versions:
        raise EncodeError(f"{declared.__name__} has no version {version}")
    writer = _writers[declared, version] = compile_writer(declared, version)
    return writer
