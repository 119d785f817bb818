"""Frames carry their size; headers name the request, whatever its version."""

from __future__ import annotations

import pytest

from anabranch.base.errors import DecodeError
from anabranch.codec import Part, TooManyElementsError
from anabranch.protocol.frames import (
    RequestHeader,
    UnsupportedVersionError,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    response_correlation_id,
)
from anabranch.protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from anabranch.protocol.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from anabranch.protocol.messages.leader_and_isr import LeaderAndIsrRequest
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData


def joined(parts: list[Part]) -> bytes:
    return b"".join(bytes(part) for part in parts)


REQUESTS = [
    (MetadataRequest(topics=[MetadataRequestTopic(name="a")]), 8),
    (MetadataRequest(topics=None), 12),
    (ApiVersionsRequest(client_software_name="x", client_software_version="1"), 3),
    (
        ProduceRequest(
            acks=-1,
            topic_data=[
                TopicProduceData(name="t", partition_data=[PartitionProduceData(index=0, records=b"r" * 5000)])
            ],
        ),
        9,
    ),
]


@pytest.mark.parametrize(("request_", "version"), REQUESTS)
@pytest.mark.parametrize("client_id", [None, "", "someone", "ü" * 200])
def test_a_request_survives_the_wire(request_: object, version: int, client_id: str | None) -> None:
    stream = joined(encode_request(request_, version, 77, client_id))
    assert int.from_bytes(stream[:4]) == len(stream) - 4
    header, decoded = decode_request(stream[4:])
    assert header == RequestHeader(header.api_key, version, 77, client_id)
    assert decoded == request_


@pytest.mark.parametrize(("api_key", "version"), [(3, 99), (3, -1), (18, 99), (999, 0), (0, 2), (0, 14), (-1, 0)])
def test_a_request_that_is_not_read_says_whom_to_answer(api_key: int, version: int) -> None:
    frame = api_key.to_bytes(2, signed=True) + version.to_bytes(2, signed=True) + b"\0\0\0\x05\0\x02me" + b"\xff" * 9
    with pytest.raises(UnsupportedVersionError) as raised:
        decode_request(frame)
    assert raised.value.header == RequestHeader(api_key, version, 5, "me")


def test_what_is_refused_is_read_in_every_version_that_is_declared() -> None:
    header, decoded = decode_request(joined(encode_request(LeaderAndIsrRequest(), 7, 1, None))[4:])
    assert (header.api_key, decoded) == (4, LeaderAndIsrRequest())


@pytest.mark.parametrize("version", [0, 2, 3, 4])
def test_the_header_of_an_api_versions_response_is_never_flexible(version: int) -> None:
    response = ApiVersionsResponse(error_code=35, api_keys=[ApiVersion(api_key=18, min_version=0, max_version=4)])
    frame = joined(encode_response(response, 18, version, 3))[4:]
    assert frame[4:6] == b"\0\x23", "the error code follows the correlation id at once"
    assert decode_response(frame, 18, version) == (3, response)


def test_records_are_parts_of_their_own_in_a_response_frame() -> None:
    class Slice:
        def __len__(self) -> int:
            return 70_000

    foreign, view = Slice(), memoryview(b"v" * 2000)
    response = FetchResponse(
        responses=[
            FetchableTopicResponse(
                topic="t", partitions=[PartitionData(records=foreign), PartitionData(records=view), PartitionData()]
            )
        ]
    )
    parts = encode_response(response, 1, 12, 9)
    assert sum(part is foreign for part in parts) == 1
    assert sum(part is view for part in parts) == 1
    assert int.from_bytes(bytes(parts[0][:4])) == sum(len(part) for part in parts) - 4
    frame = b"".join(b"s" * 70_000 if part is foreign else bytes(part) for part in parts)[4:]
    correlation_id, decoded = decode_response(frame, 1, 12)
    assert correlation_id == response_correlation_id(frame) == 9
    assert [len(each.records or b"") for each in decoded.responses[0].partitions] == [70_000, 2000, 0]


def test_a_header_cut_anywhere_is_a_decode_error() -> None:
    for request, version in REQUESTS:
        frame = joined(encode_request(request, version, 1, "client"))[4:]
        for end in range(min(len(frame), 60)):
            with pytest.raises(DecodeError):
                decode_request(frame[:end])


def test_a_client_id_that_is_cut_off_is_a_decode_error_though_nothing_follows_it() -> None:
    frame = joined(encode_request(ApiVersionsRequest(), 0, 1, "client"))[4:]
    assert decode_request(frame)[0].client_id == "client"
    for end in range(len(frame)):
        with pytest.raises(DecodeError):
            decode_request(frame[:end])


def test_a_request_of_more_elements_than_the_caller_wants_is_an_error_of_its_own() -> None:
    topics = [MetadataRequestTopic(name=f"{number}") for number in range(4)]
    frame = joined(encode_request(MetadataRequest(topics=topics), 8, 1, None))[4:]
    assert decode_request(frame, 4)[1].topics == topics
    with pytest.raises(TooManyElementsError):
        decode_request(frame, 3)


@pytest.mark.parametrize("frame", [b"", b"\0\0\0", b"\0\0\0\1", b"\0\0\0\1\1\0\5", b"\0\0\0\1" + b"\xff" * 9])
def test_a_response_header_cut_anywhere_is_a_decode_error(frame: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_response(frame, 3, 12)


def test_bytes_behind_a_request_are_passed_over_as_librdkafka_sends_them() -> None:
    frame = joined(encode_request(*REQUESTS[0], 1, None))[4:]
    assert decode_request(frame + bytes(3)) == decode_request(frame)


def test_bytes_behind_a_response_are_a_decode_error() -> None:
    frame = joined(encode_response(MetadataResponse(), 3, 12, 1))[4:] + b"\0"
    with pytest.raises(DecodeError, match="left over"):
        decode_response(frame, 3, 12)
