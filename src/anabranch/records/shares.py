"""The share of a partition's records that one of several readers takes (keyspace.md, section 5)."""

from __future__ import annotations

from typing import NamedTuple


class KeyShare(NamedTuple):
    """Which of the records that were appended to a partition while one layout ruled; all bounds are inclusive.

    `machines.keyspace` and docs/hashing.md define `spread` and intervals.
    """

    keys: tuple[int, int]
    """The places of the key space of which the reader takes the records."""
    initial: int
    """The topic's partition count at creation."""
    held: tuple[int, int]
    """The partition's interval in that layout: records without a key are spread over it, by offset."""
