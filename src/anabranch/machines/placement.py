"""Linear hashing: which partition holds a key when a topic has `count` partitions (ordering.md, section 2).

The rule it keeps: when the count changes, a key stays where it is or moves to exactly one partition, and keys never
move between partitions that both layouts have. At `count = initial * 2**L` the placement is the Java client's own.

`place` is plain arithmetic, so the same function serves one hash (int) and a column of them (NumPy array).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Hash = TypeVar("Hash", int, NDArray[np.int32], NDArray[np.int64])
else:
    Hash = TypeVar("Hash")


def level_size(count: int, initial: int) -> int:
    """The largest `initial * 2**L` that is not above `count`."""
    assert count >= initial >= 1
    return int(initial << ((count // initial).bit_length() - 1))


def place(key_hash: Hash, initial: int, count: int) -> Hash:
    """Choose the partition of `key_hash` (`murmur2(key) & 0x7fffffff`) among `count` (KIP-253, Proposed Changes 5).

    `initial` is the topic's partition count at creation. For an array the answer is an array of its type; a hash
    column must be wide enough for `2 * count`.
    """
    size = level_size(count, initial)
    bucket: Hash
    wider: Hash
    if size & size - 1 == 0:  # Masking an array takes a tenth of the time of dividing it.
        bucket, wider = key_hash & size - 1, key_hash & 2 * size - 1
    else:
        bucket, wider = key_hash % size, key_hash % (2 * size)
    return bucket + (wider - bucket) * (bucket < count - size)


def ancestor(partition: int, count: int, initial: int) -> int:
    """The one partition below `count` that holds the keys of `partition` when the topic has `count` partitions."""
    assert partition >= 0 and count >= initial
    while partition >= count:
        partition -= level_size(partition, initial)
    return partition
