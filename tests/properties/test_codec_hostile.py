"""Any bytes give a message or a `DecodeError`, and cost no more memory than they are worth."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.base.errors import DecodeError
from anabranch.base.limits import ARRAY_LENGTH_MAX, TAGGED_FIELDS_MAX
from anabranch.codec import decode
from anabranch.codec.primitives import uvarint
from anabranch.protocol.frames import decode_request, decode_response
from anabranch.protocol.messages.fetch import FetchRequest, FetchResponse
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataResponse
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequest
from anabranch.protocol.messages.produce import ProduceRequest
from anabranch.protocol.registry import API
from tests.support.messages import CLASSES, filled, joined, versions_of

HOSTILE = [
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\xff\xff\xff\xff",
    b"\x00\x7f\xff\xff",
    b"\xff\xff\xff\xff\x07",
    b"\xff\xff\xff\xff\xff\xff",
]


def attempt(declared: type, data: bytes | bytearray | memoryview, version: int) -> Any:
    """Decode; anything that is neither a message nor a DecodeError fails the test."""
    try:
        return decode(declared, data, version)
    except DecodeError:
        return None


def samples(declared: type) -> Iterator[tuple[int, bytes]]:
    for version in versions_of(declared):
        if encoded := joined(filled(declared, version, Random(version)), version):
            yield version, encoded


@pytest.mark.parametrize("declared", CLASSES, ids=lambda declared: declared.__name__)
def test_a_message_cut_at_any_byte_is_a_decode_error(declared: type) -> None:
    for version, encoded in samples(declared):
        assert decode(declared, encoded, version) is not None
        view = memoryview(encoded)
        survivors = [end for end in range(len(encoded)) if attempt(declared, view[:end], version) is not None]
        assert not survivors, version


@pytest.mark.parametrize("declared", CLASSES, ids=lambda declared: declared.__name__)
def test_a_hostile_length_at_any_byte_gives_a_message_or_a_decode_error(declared: type) -> None:
    random = Random(declared.__name__)
    for version, encoded in samples(declared):
        for position in range(len(encoded)):
            harm = random.choice(HOSTILE)
            attempt(declared, encoded[:position] + harm + encoded[position + len(harm) :], version)
            attempt(declared, encoded[:position] + harm + encoded[position:], version)


@pytest.mark.parametrize("declared", CLASSES, ids=lambda declared: declared.__name__)
def test_mutations_and_noise_give_a_message_or_a_decode_error(declared: type) -> None:
    random = Random(declared.__name__)
    for version, encoded in samples(declared):
        for _ in range(15):
            harmed = bytearray(encoded)
            for _ in range(random.randrange(1, 6)):
                harmed[random.randrange(len(harmed))] = random.getrandbits(8)
            attempt(declared, harmed, version)
            attempt(declared, random.randbytes(random.randrange(60)), version)
            attempt(declared, bytes(random.choices(range(4), k=40)), version)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(data=st.binary(max_size=80))
def test_any_frame_gives_a_message_or_a_decode_error(data: bytes) -> None:
    for prefix in (b"", b"\0\0\0\x09", b"\0\x03\0\x0c", b"\0\x12\0\x03\0\0\0\0\xff\xff"):
        with suppress(DecodeError):
            decode_request(prefix + data)
    for api_key, version in ((0, 9), (1, 12), (3, 12), (18, 3), (18, 0)):
        with suppress(DecodeError):
            decode_response(data, api_key, version)


class Peak:
    """The most memory that was allocated within."""

    def __enter__(self) -> Peak:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


FIVE = b"\xff\xff\xff\xff\x07"
HUGE = [
    (ProduceRequest, 9, b"\0\xff\xff\0\0\0\0" + FIVE),
    (ProduceRequest, 9, FIVE),
    (ProduceRequest, 3, b"\xff\xff\xff\xff\0\0\0\0\x7f\xff\xff\xff"),
    (ProduceRequest, 9, b"\0\xff\xff\0\0\0\0\x02\x02t\x02\0\0\0\0" + FIVE),
    (FetchRequest, 4, b"\0" * 17 + b"\x7f\xff\xff\xff"),
    (MetadataRequest, 0, b"\x7f\xff\xff\xff"),
    (MetadataRequest, 9, FIVE),
    (MetadataResponse, 12, b"\0\0\0\0" + FIVE),
    (FetchResponse, 12, b"\0\0\0\0\0\0\0\0\0\0\x02\x02t\x02" + b"\0" * 30 + FIVE + FIVE + FIVE),
    (MetadataRequest, 9, b"\x01\0\0\0\x01\x01" + FIVE),
    (MetadataRequest, 9, b"\x01\0\0\0" + FIVE),
]


@pytest.mark.parametrize(("declared", "version", "start"), HUGE)
@pytest.mark.parametrize("room", [0, 4096])
def test_a_hostile_length_allocates_nothing(declared: type, version: int, start: bytes, room: int) -> None:
    data = start + bytes(room)
    attempt(declared, data, version)
    with Peak() as peak, pytest.raises(DecodeError):
        decode(declared, data, version)
    assert peak.size < 16_384


def test_a_large_frame_cannot_hold_elements_without_number() -> None:
    frame = bytearray(100 << 20)
    frame[:12] = b"\0\xff\xff\0\0\0\0" + uvarint(30_000_000 + 1) + b"\0"
    attempt(ProduceRequest, frame, 9)
    with Peak() as peak, pytest.raises(DecodeError):
        decode(ProduceRequest, frame, 9)
    assert peak.size < 16_384


def test_elements_are_counted_over_all_arrays_of_a_message() -> None:
    topic = b"\0\1t" + (100_000).to_bytes(4) + bytes(400_000)
    most = ARRAY_LENGTH_MAX // 100_001
    assert attempt(OffsetFetchRequest, b"\0\1g" + most.to_bytes(4) + topic * most, 1) is not None
    with Peak() as peak, pytest.raises(DecodeError, match="elements"):
        decode(OffsetFetchRequest, b"\0\1g" + (30).to_bytes(4) + topic * 30, 1)
    assert peak.size < 64 << 20


def test_tagged_fields_are_bounded_in_number() -> None:
    tags = b"".join(uvarint(number) + b"\0" for number in range(TAGGED_FIELDS_MAX + 1))
    head = b"\x01\0\0\0"
    assert attempt(MetadataRequest, head + uvarint(TAGGED_FIELDS_MAX) + tags[: -len(uvarint(1000)) - 1], 9) is not None
    with pytest.raises(DecodeError, match="tagged fields"):
        decode(MetadataRequest, head + uvarint(TAGGED_FIELDS_MAX + 1) + tags, 9)


def test_a_tag_that_comes_twice_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="twice"):
        decode(MetadataRequest, b"\x01\0\0\0\x02\x05\0\x05\0", 9)
    with pytest.raises(DecodeError, match="twice"):
        decode(FetchRequest, bytes(25) + b"\x01\x01\x01" + b"\x02\x00\x01\x00\x00\x01\x00", 12)


def test_text_that_is_not_utf8_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="UTF-8"):
        decode(MetadataRequest, b"\0\0\0\1\0\1\xff", 0)


def test_every_api_is_covered() -> None:
    assert {api.request for api in API.values()} | {api.response for api in API.values()} <= set(CLASSES)
