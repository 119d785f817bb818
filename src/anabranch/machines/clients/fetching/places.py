"""Where records lie in the key space, for readers that leave out some by themselves."""

from __future__ import annotations

from functools import lru_cache

from anabranch.machines.keyspace import keyless_spread, spread
from anabranch.machines.lineage import Lineage
from anabranch.records.hashing import murmur2

KNOWN_PLACES = 65_536


def place_of(lineage: Lineage, partition: int, key: bytes | None, offset: int) -> int:
    """The place of a record: of its key, or, without one, of its offset in its partition."""
    if key is None:
        return keyless_spread(offset, lineage.held(partition, lineage.layout_at(partition, offset)))
    return _spread(key, lineage.initial)


@lru_cache(KNOWN_PLACES)
def _spread(key: bytes, initial: int) -> int:
    return spread(murmur2(key), initial)
