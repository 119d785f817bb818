"""Commits by ranges on the wire: the tags and the order of their fields, and how much of them one request may have."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.base.errors import DecodeError
from anabranch.base.limits import RANGES_PER_COMMIT_MAX
from anabranch.codec import decode
from anabranch.protocol.bounds import ELEMENTS_MAX
from anabranch.protocol.frames import decode_request, encode_request
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
    OffsetRange,
)
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from tests.support.messages import joined

RANGES = [OffsetRange(start=41, end=42), OffsetRange(start=46, end=2**62)]
KEYS = [KeyRangeOffset(start=0, end=2**62 - 1, offset=9), KeyRangeOffset(start=2**62, end=2**63 - 1, offset=50)]
TAGGED = (
    "02"  # two tagged fields
    "904e" "23" "03"  # 10000, of 35 bytes: two ranges of offsets
    "0000000000000029" "000000000000002a" "00"
    "000000000000002e" "4000000000000000" "00"
    "914e" "33" "03"  # 10001, of 51 bytes: two ranges of keys
    "0000000000000000" "3fffffffffffffff" "0000000000000009" "00"
    "4000000000000000" "7fffffffffffffff" "0000000000000032" "00"
)  # fmt: skip
FRACTION: dict[str, Any] = {"partition_index": 3, "committed_offset": -1, "committed_metadata": None}
BOTH: dict[str, Any] = {"offset_ranges": RANGES, "key_range_offsets": KEYS}
FETCHED: dict[str, Any] = {"committed_offset": 41, "metadata": "", "error_code": 0}
FOUND: dict[str, Any] = {"partition_index": 3, "committed_range_offsets": RANGES, "key_range_offsets": KEYS, **FETCHED}


def commit(**fields: Any) -> OffsetCommitRequest:
    part = OffsetCommitRequestPartition(**FRACTION, **fields)
    return OffsetCommitRequest(
        wants_stable_offset=True, group_id="g", topics=[OffsetCommitRequestTopic(partitions=[part])]
    )


def commit_in_transaction(**fields: Any) -> TxnOffsetCommitRequest:
    part = TxnOffsetCommitRequestPartition(**FRACTION, **fields)
    return TxnOffsetCommitRequest(group_id="g", topics=[TxnOffsetCommitRequestTopic(name="t", partitions=[part])])


def fetched(version: int) -> OffsetFetchResponse:
    if version < 8:
        part = OffsetFetchResponsePartition(**FOUND)
        return OffsetFetchResponse(topics=[OffsetFetchResponseTopic(name="t", partitions=[part])])
    parts = OffsetFetchResponsePartitions(**FOUND)
    group = OffsetFetchResponseGroup(group_id="g", topics=[OffsetFetchResponseTopics(partitions=[parts])])
    return OffsetFetchResponse(groups=[group])


def told() -> tuple[Any, Any]:
    part = OffsetCommitResponsePartition(partition_index=3, last_stable_offset=41)
    in_transaction = TxnOffsetCommitResponsePartition(partition_index=3, last_stable_offset=41)
    return (
        OffsetCommitResponse(topics=[OffsetCommitResponseTopic(partitions=[part])]),
        TxnOffsetCommitResponse(topics=[TxnOffsetCommitResponseTopic(name="t", partitions=[in_transaction])]),
    )


@pytest.mark.parametrize("version", range(8, 11))
def test_a_commit_has_both_forms_in_tagged_fields_of_its_partition(version: int) -> None:
    made = commit(**BOTH)
    written = joined(made, version)
    assert TAGGED in written.hex()
    assert decode(OffsetCommitRequest, written, version) == made


@pytest.mark.parametrize("version", range(3, 6))
def test_a_commit_of_a_transaction_has_the_same_fields(version: int) -> None:
    made = commit_in_transaction(**BOTH)
    written = joined(made, version)
    assert TAGGED in written.hex()
    assert decode(TxnOffsetCommitRequest, written, version) == made


@pytest.mark.parametrize("version", range(6, 11))
def test_a_fetch_is_answered_with_both(version: int) -> None:
    made = fetched(version)
    written = joined(made, version)
    assert TAGGED in written.hex()
    assert decode(OffsetFetchResponse, written, version) == made


def test_answers_tell_the_stable_offset() -> None:
    for made, version in zip(told(), (8, 3), strict=True):
        written = joined(made, version)
        assert "00000003000001904e080000000000000029" in written.hex()
        assert decode(type(made), written, version) == made


def test_versions_that_are_not_flexible_go_without() -> None:
    assert joined(commit(**BOTH), 7) == joined(commit(), 7)
    assert joined(commit_in_transaction(**BOTH), 2) == joined(commit_in_transaction(), 2)


def request(api: type, count: int) -> bytes:
    ranges = [OffsetRange(start=2 * it, end=2 * it) for it in range(count)]
    if api is OffsetCommitRequest:
        frame = encode_request(commit(offset_ranges=ranges), 10, 1, "c")
    else:
        frame = encode_request(commit_in_transaction(offset_ranges=ranges), 4, 1, "c")
    return b"".join(bytes(it) for it in frame)[4:]


@pytest.mark.parametrize("api", [OffsetCommitRequest, TxnOffsetCommitRequest])
def test_more_ranges_than_a_commit_may_have_are_read_and_can_be_answered_and_the_elements_are_bounded(
    api: type,
) -> None:
    _, found = decode_request(request(api, RANGES_PER_COMMIT_MAX + 1))
    assert len(found.topics[0].partitions[0].offset_ranges) == RANGES_PER_COMMIT_MAX + 1
    bound = ELEMENTS_MAX[8 if api is OffsetCommitRequest else 28]
    with pytest.raises(DecodeError, match="more elements than its API allows"):
        decode_request(request(api, bound))
