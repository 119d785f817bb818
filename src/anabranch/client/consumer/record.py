"""A record as applications get it, and the columns of a table of records."""

from __future__ import annotations

from typing import NamedTuple

COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value")
"""The columns that `poll_arrow` returns unless others are asked for."""


class Record(NamedTuple):
    """A record, as read. `timestamp_type` is 0 for the producer's time and 1 for the broker's.

    `delivery_count` is more than 1 for a record that was rejected before; `lease` names this hand-out for `done` and
    `reject`, and is 0 where they do not apply.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    delivery_count: int = 1
    lease: int = 0
