"""What a log file holds after the power went: the batches up to the first that is torn or corrupt."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.records.batch import HEADER_SIZE, BatchHeader, check, parse_header
from anabranch.runtime.disk import File

SCAN_SIZE = 4 << 20


class Tail(NamedTuple):
    """Where the sound part of a file ends, and why it ends there."""

    size: int
    reason: str | None
    """None when the whole file is sound."""


def scan(file: File, position: int, size: int, next_offset: int, visit: Callable[[int, BatchHeader], None]) -> Tail:
    """Check the batches from `position` to `size`: header, length, CRC, and that offsets go on from `next_offset`."""
    start, window = position, b""
    while position < size:
        if size - position < HEADER_SIZE:
            return Tail(position, f"{size - position} bytes are left, which is no batch header")
        if position + HEADER_SIZE > start + len(window):
            start, window = position, file.read(min(SCAN_SIZE, size - position), position)
        try:
            header = parse_header(window, position - start, size - position)
        except DecodeError as error:
            return Tail(position, str(error))
        if header.base_offset < next_offset:
            return Tail(position, f"the batch begins at offset {header.base_offset}, expected {next_offset} or above")
        if position + header.size > start + len(window):
            start, window = position, file.read(max(SCAN_SIZE, header.size), position)
        try:
            check(window, position - start, header)
        except DecodeError as error:
            return Tail(position, str(error))
        visit(position, header)
        next_offset = header.next_offset
        position += header.size
    return Tail(position, None)
