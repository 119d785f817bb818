"""The records of `__transaction_state`, as Apache Kafka writes them: TransactionLogKey v0, TransactionLogValue v0-1.

Each begins with its version as an int16. The last value of a transactional id is its whole state; no
value means that it is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING

from anabranch.base.errors import DecodeError
from anabranch.codec import Blob, array, decode, encode, int8, int16, int32, int64, message, string, struct

if TYPE_CHECKING:
    from anabranch.machines.transactions.transaction import Transaction

KEY_VERSION = 0
VALUE_VERSION = 1
"""The version that is written; 0 is read too."""
_VERSION = Struct(">h")


@message(versions="0")
class TransactionLogKey:
    """The transactional id."""

    transactional_id: str = string()


@struct()
class PartitionsSchema:
    """Partitions of one topic."""

    topic: str = string()
    partition_ids: Sequence[int] = array(int32)


@message(versions="0-1", flexible="1+")
class TransactionLogValue:
    """How far the transaction is; v1 adds the tagged fields, by which a rotated producer id is recognised."""

    producer_id: int = int64()
    previous_producer_id: int = int64(since=1, tag=0, default=-1)
    next_producer_id: int = int64(since=1, tag=1, default=-1)
    producer_epoch: int = int16()
    next_producer_epoch: int = int16(since=1, tag=3, default=-1)
    transaction_timeout_ms: int = int32()
    transaction_status: int = int8()
    transaction_partitions: Sequence[PartitionsSchema] | None = array(PartitionsSchema, nullable=True)
    transaction_last_update_timestamp_ms: int = int64()
    transaction_start_timestamp_ms: int = int64()
    client_transaction_version: int = int16(since=1, tag=2, default=0)


@dataclass(frozen=True, slots=True)
class TransactionRecord:
    """One record; without a value the id is forgotten."""

    key: TransactionLogKey
    value: TransactionLogValue | None
    decided: Transaction | None = field(default=None, compare=False)
    """Of a record that is about to be written: what its value says, which takes long to read where it is large."""


def encode_record(record: TransactionRecord) -> tuple[bytes, bytes | None]:
    """Write a record as the key and value of a log's record."""
    key = _VERSION.pack(KEY_VERSION) + b"".join(encode(record.key, KEY_VERSION))
    if record.value is None:
        return key, None
    return key, _VERSION.pack(VALUE_VERSION) + b"".join(encode(record.value, VALUE_VERSION))


def decode_record(key: Blob, value: Blob | None) -> TransactionRecord | None:
    """Read a record; None for an unknown kind. DecodeError for a damaged record."""
    if _version(key) != KEY_VERSION:
        return None
    read = decode(TransactionLogKey, memoryview(key)[_VERSION.size :], KEY_VERSION)
    if value is None:
        return TransactionRecord(read, None)
    version = _version(value)
    if not 0 <= version <= VALUE_VERSION:
        raise DecodeError(f"transactional id {read.transactional_id!r} has a record of version {version}, not 0 or 1")
    return TransactionRecord(read, decode(TransactionLogValue, memoryview(value)[_VERSION.size :], version))


def _version(data: Blob) -> int:
    if len(data) < _VERSION.size:
        raise DecodeError(f"a record of {len(data)} bytes in __transaction_state")
    version: int = _VERSION.unpack_from(data)[0]
    return version
