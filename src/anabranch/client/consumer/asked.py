"""What a fetch says of the records that it wants: ranges of keys, keys, and sizes."""

from __future__ import annotations

from typing import Any

from anabranch.machines.partition.sharing import Asked
from anabranch.protocol.messages.fetch import KeyRange, RecordFilter


def wanted_fields(asked: Asked) -> dict[str, Any]:
    """The fields of a fetch partition that say what is wanted of its records."""
    fields: dict[str, Any] = {"key_ranges": [KeyRange(start=start, end=end) for start, end in asked.ranges]}
    if not asked.is_share:
        fields["filter"] = RecordFilter(
            keys_wanted=asked.keys_wanted,
            keys_refused=asked.keys_refused,
            size_min=asked.size_min,
            size_max=asked.size_max,
        )
    return fields
