"""Records without a key, found in produced batches: a compacted topic takes none (ordering.md, section 7).

Looking at a record costs about a microsecond; a compressed batch must be expanded first. A caller with an event loop
asks `is_quick` of the batches first, and looks into them in another thread where the answer is no.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.records.batch import BatchHeader, expanded, headers
from anabranch.records.compression import COMPRESSION_MASK
from anabranch.records.rows import iterate

QUICK_RECORDS_MAX = 2_000
"""Records that an event loop can wait for: some 3 ms."""


class Unfit(NamedTuple):
    """A batch that no compacted topic takes."""

    batch: int
    """Its place among the batches of its partition."""
    keyless: tuple[int, ...]
    """The places of its records without a key, ascending; none where the batch cannot be read."""
    malformed: str | None = None
    """Why the batch cannot be read."""


def is_quick(sent: Iterable[memoryview]) -> bool:
    """Whether all batches sent to compacted topics together are looked into within a few milliseconds."""
    count = 0
    for batches in sent:
        try:
            for _, header in headers(batches):
                count += header.record_count
                if header.attributes & COMPRESSION_MASK or count > QUICK_RECORDS_MAX:
                    return False
        except DecodeError:
            continue  # No batches; `machines.partition.checking` refuses them.
    return True


def find_unfit(batches: memoryview) -> Unfit | None:
    """Find the first batch with a record without a key, or with malformed records; None where all are fit.

    Bytes behind the sound batches are left to `machines.partition.checking`.
    """
    number = 0
    try:
        for number, (position, header) in enumerate(headers(batches)):
            found = keyless(batches[position : position + header.size], header)
            if found:
                return Unfit(number, tuple(found))
    except DecodeError as error:
        return Unfit(number, (), str(error))
    return None


def keyless(batch: memoryview, header: BatchHeader) -> list[int]:
    """List the places of a batch's records without a key; DecodeError where the records are malformed."""
    records = iterate(expanded(batch, header), header.record_count, header.base_offset)
    return [place for place, record in enumerate(records) if record.key_end < 0]
