"""The hashes of a key in plain Python: the reference that the kernels are tested against.

Placement takes `murmur2(key) & 0x7fffffff`, as Kafka's Java client does. `machines.keyspace` makes of it, and of
MurmurHash3's 64-bit finaliser, the place of a key in the key space. `docs/hashing.md` has test vectors.
"""

from __future__ import annotations

PLACEMENT_HASH_MAX = 0x7FFF_FFFF

_MASK_32 = 0xFFFF_FFFF
_MASK_64 = 0xFFFF_FFFF_FFFF_FFFF
_MULTIPLIER = 0x5BD1_E995
_SEED = 0x9747_B28C


def murmur2(key: bytes) -> int:
    """Hash a key as Kafka's Java client does, as an unsigned 32-bit number."""
    size = len(key)
    value = _SEED ^ size
    whole = size & ~3
    for position in range(0, whole, 4):
        word = int.from_bytes(key[position : position + 4], "little") * _MULTIPLIER & _MASK_32
        word = (word ^ word >> 24) * _MULTIPLIER & _MASK_32
        value = value * _MULTIPLIER & _MASK_32 ^ word
    if whole < size:
        value = (value ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER & _MASK_32
    value = (value ^ value >> 13) * _MULTIPLIER & _MASK_32
    return value ^ value >> 15


def placement_hash(key: bytes) -> int:
    """The hash that chooses a key's partition (ordering.md, section 2)."""
    return murmur2(key) & PLACEMENT_HASH_MAX


def fmix64(value: int) -> int:
    """MurmurHash3's 64-bit finaliser, on and to an unsigned 64-bit number."""
    value &= _MASK_64
    value = (value ^ value >> 33) * 0xFF51_AFD7_ED55_8CCD & _MASK_64
    value = (value ^ value >> 33) * 0xC4CE_B9FE_1A85_EC53 & _MASK_64
    return value ^ value >> 33
