"""The memory that strings take: of a client's choosing, up to four bytes for each byte that it sends."""

from __future__ import annotations

_EMPTY = "".__sizeof__()


def text_size(text: str | None) -> int:
    """Bytes of memory of a string, without those that an empty one has: its length where all of it is ASCII."""
    return 0 if text is None else text.__sizeof__() - _EMPTY
