"""The two hashes of a key (wire.md, section 4), in plain Python: the reference that the kernels are tested against.

Placement takes `murmur2(key) & 0x7fffffff`, as Kafka's Java client does. Key ranges take that 32-bit hash through
MurmurHash3's 64-bit finaliser, which spreads it evenly over [0, 2**63 - 1]; a record without a key counts as its
offset. `docs/hashing.md` has test vectors of both.
"""

from __future__ import annotations

PLACEMENT_HASH_MAX = 0x7FFF_FFFF
RANGE_HASH_MAX = 0x7FFF_FFFF_FFFF_FFFF

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


def range_hash(murmur: int) -> int:
    """Where in the key range a record lies, from its key's murmur2, or from its offset when it has no key."""
    return fmix64(murmur) & RANGE_HASH_MAX
