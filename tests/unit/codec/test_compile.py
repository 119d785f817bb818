"""Compiled readers and writers: bytes on the wire, version by version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from anabranch.base.errors import DecodeError, shortened
from anabranch.base.limits import STRING_SIZE_MAX
from anabranch.codec import EncodeError, decode, decode_prefix, encode, encoded_size, unknown_tags
from anabranch.codec.primitives import INLINE_SIZE_MAX, read_uvarint, uvarint
from anabranch.machines.groups.records import ConsumerGroupMemberMetadataValue
from anabranch.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from anabranch.protocol.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from anabranch.protocol.messages.create_topics import CreatableTopicResult, CreateTopicsResponse
from anabranch.protocol.messages.fetch import (
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    LeaderIdAndEpoch,
    PartitionData,
)
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData


def joined(message: object, version: int) -> bytes:
    return b"".join(bytes(part) for part in encode(message, version))


HEARTBEAT = HeartbeatRequest(group_id="g", generation_id=5, member_id="m", group_instance_id="i")


def test_a_version_carries_the_fields_it_has() -> None:
    assert joined(HEARTBEAT, 0) == b"\0\1g\0\0\0\5\0\1m"
    assert joined(HEARTBEAT, 3) == b"\0\1g\0\0\0\5\0\1m\0\1i"
    assert joined(HEARTBEAT, 4) == b"\2g\0\0\0\5\2m\2i\0"


def test_a_field_that_the_version_lacks_has_its_default() -> None:
    assert decode(HeartbeatRequest, joined(HEARTBEAT, 0), 0).group_instance_id is None


@pytest.mark.parametrize("version", [-1, 5, 100])
def test_a_version_that_is_not_declared(version: int) -> None:
    with pytest.raises(DecodeError, match="no version"):
        decode(HeartbeatRequest, b"", version)
    with pytest.raises(EncodeError, match="no version"):
        encode(HEARTBEAT, version)


def test_null_only_where_the_version_has_null() -> None:
    assert decode(MetadataRequest, joined(MetadataRequest(topics=None), 1), 1).topics is None
    with pytest.raises(EncodeError):
        encode(MetadataRequest(topics=None), 0)
    with pytest.raises(DecodeError):
        decode(MetadataRequest, b"\xff\xff\xff\xff", 0)
    with pytest.raises(DecodeError):
        decode(MetadataRequest, b"\0\0\0\1\xff\xff", 0)


@pytest.mark.parametrize(
    "message",
    [
        HeartbeatRequest(generation_id=1 << 31),
        HeartbeatRequest(generation_id="five"),  # type: ignore[arg-type]
        HeartbeatRequest(group_id=None),  # type: ignore[arg-type]
        HeartbeatRequest(group_id="\ud800"),
        HeartbeatRequest(group_id="x" * 40_000),
    ],
)
def test_what_a_version_cannot_carry_is_an_encode_error(message: HeartbeatRequest) -> None:
    with pytest.raises(EncodeError, match="HeartbeatRequest version 0"):
        encode(message, 0)


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("text", ["x" * STRING_SIZE_MAX, "é" * (STRING_SIZE_MAX // 2)])
def test_the_longest_string_that_is_read(version: int, text: str) -> None:
    message = HeartbeatRequest(group_id=text, group_instance_id=text)
    assert decode(HeartbeatRequest, joined(message, version), version) == message


LONG_STRINGS: dict[str, Callable[[str], tuple[object, int]]] = {
    "string": lambda text: (HeartbeatRequest(group_id=text), 4),
    "nullable": lambda text: (HeartbeatRequest(group_instance_id=text), 4),
    "of an array": lambda text: (ConsumerGroupHeartbeatRequest(subscribed_topic_names=[text]), 0),
    "tagged": lambda text: (FetchRequest(cluster_id=text), 12),
    "of a response": lambda text: (ConsumerGroupHeartbeatResponse(member_id=text), 0),
}


@pytest.mark.parametrize("name", LONG_STRINGS)
def test_a_longer_string_of_a_peer_is_a_decode_error(name: str) -> None:
    message, version = LONG_STRINGS[name]("x" * STRING_SIZE_MAX)
    assert decode(type(message), joined(message, version), version) == message
    for text in ("x" * (STRING_SIZE_MAX + 1), "é" * (STRING_SIZE_MAX // 2 + 1)):
        message, version = LONG_STRINGS[name](text)
        with pytest.raises(DecodeError, match="a string of 32768 bytes; at most 32767 are read"):
            decode(type(message), joined(message, version), version)


@pytest.mark.parametrize("version", [2, 5])
@pytest.mark.parametrize("text", ["x" * 40_000, "\N{GRINNING FACE}" * 32_767], ids=["ASCII", "four bytes each"])
def test_of_a_long_sentence_the_middle_is_left_out(version: int, text: str) -> None:
    """It quotes what clients have named, and they could not read all of it; other sentences are as they were."""
    results = [CreatableTopicResult(name=text[:100], error_message=it) for it in (f"No {text}.", "No.", "", None)]
    found = decode(CreateTopicsResponse, joined(CreateTopicsResponse(topics=results), version), version).topics
    assert [it.error_message for it in found] == [shortened(f"No {text}."), "No.", "", None]
    assert [it.name for it in found] == [text[:100]] * 4


def test_a_long_sentence_in_a_tagged_field_is_shortened() -> None:
    """Of which a reader takes the size as it comes."""
    data = PartitionData(error_message="x" * 40_000)
    response = FetchResponse(responses=[FetchableTopicResponse(partitions=[data])])
    (found,) = decode(FetchResponse, joined(response, 17), 17).responses[0].partitions
    assert found.error_message == shortened("x" * 40_000)


def test_a_long_string_of_a_log_is_read_as_it_was_written() -> None:
    """An earlier version took any from its clients: the log of its coordinator is still read."""
    value = ConsumerGroupMemberMetadataValue(rack_id="x" * 40_000)
    assert decode(ConsumerGroupMemberMetadataValue, joined(value, 0), 0) == value


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(buffer: Any) -> None:
    assert decode(HeartbeatRequest, buffer(joined(HEARTBEAT, 4)), 4) == HEARTBEAT


def test_a_prefix_says_where_it_ends() -> None:
    subscription = ConsumerProtocolSubscription(topics=["a"], user_data=b"u")
    encoded = b"??" + joined(subscription, 1) + b"later versions have more"
    message, position = decode_prefix(ConsumerProtocolSubscription, encoded, 1, 2)
    assert message == subscription
    assert encoded[position:] == b"later versions have more"


def test_bytes_left_over_are_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="1 bytes left over"):
        decode(HeartbeatRequest, joined(HEARTBEAT, 4) + b"\0", 4)


def test_unknown_tags_are_kept_and_written_back_in_order() -> None:
    encoded = joined(HEARTBEAT, 4)[:-1] + b"\x02\x05\x03abc\x07\x00"
    message = decode(HeartbeatRequest, encoded, 4)
    assert unknown_tags(message) == {5: b"abc", 7: b""}
    assert joined(message, 4) == encoded
    assert joined(message, 3) == joined(HEARTBEAT, 3), "a version without tags drops them"
    assert message != HEARTBEAT
    assert not unknown_tags(HEARTBEAT)


def test_known_and_unknown_tags_are_written_in_order() -> None:
    response = ConsumerGroupHeartbeatResponse(should_compute_assignment=True)
    known = joined(response, 0)
    assert known.endswith(b"\x01" + uvarint(10_000) + b"\x01\x01")
    mixed = known[:-5] + b"\x03\x01\x00" + uvarint(10_000) + b"\x01\x01" + uvarint(20_000) + b"\x00"
    message = decode(ConsumerGroupHeartbeatResponse, mixed, 0)
    assert message.should_compute_assignment
    assert unknown_tags(message) == {1: b"", 20_000: b""}
    assert joined(message, 0) == mixed


def test_a_tagged_field_with_its_default_is_not_written() -> None:
    plain = TopicProduceData(name="t")
    said = TopicProduceData(name="t", undeleted_partition_count=6)
    sizes = [encoded_size(ProduceRequest(topic_data=[topic]), 9) for topic in (plain, said)]
    assert sizes[1] - sizes[0] == 2 + 1 + 4
    assert encoded_size(ProduceRequest(topic_data=[said]), 8) == encoded_size(ProduceRequest(topic_data=[plain]), 8)


def test_a_tagged_value_that_is_not_as_long_as_its_tag_says() -> None:
    encoded = joined(ProduceRequest(topic_data=[TopicProduceData(name="t", undeleted_partition_count=6)]), 9)
    at = encoded.index(uvarint(10_000)) + 2
    with pytest.raises(DecodeError, match="not as long"):
        decode(ProduceRequest, encoded[:at] + b"\x05" + encoded[at + 1 :] + b"\0", 9)


def test_a_nullable_struct() -> None:
    for assignment in (None, Assignment(), Assignment(error=2, metadata_bytes=b"m")):
        response = ConsumerGroupHeartbeatResponse(assignment=assignment)
        assert decode(ConsumerGroupHeartbeatResponse, joined(response, 0), 0) == response


def test_a_tagged_struct_that_was_not_said_is_none() -> None:
    response = FetchResponse(responses=[FetchableTopicResponse(partitions=[PartitionData()])])
    (topic,) = decode(FetchResponse, joined(response, 12), 12).responses
    assert topic.partitions[0].current_leader is None
    response.responses[0].partitions[0].current_leader = LeaderIdAndEpoch(leader_id=3, leader_epoch=4)
    (topic,) = decode(FetchResponse, joined(response, 12), 12).responses
    assert topic.partitions[0].current_leader == LeaderIdAndEpoch(leader_id=3, leader_epoch=4)


def produce(records: Any) -> ProduceRequest:
    partition = PartitionProduceData(index=0, records=records)
    return ProduceRequest(topic_data=[TopicProduceData(name="t", partition_data=[partition])])


@pytest.mark.parametrize("version", [3, 9])
def test_large_records_are_a_part_of_their_own_and_small_ones_are_not(version: int) -> None:
    large, small = bytes(INLINE_SIZE_MAX + 1), bytes(INLINE_SIZE_MAX)
    assert any(part is large for part in encode(produce(large), version))
    assert len(encode(produce(small), version)) == 1
    for records in (large, small, b"", None):
        again = decode(ProduceRequest, joined(produce(records), version), version)
        assert again.topic_data[0].partition_data[0].records == records
        assert encoded_size(produce(records), version) == len(joined(produce(records), version))


def test_records_are_read_as_a_view_of_the_buffer() -> None:
    buffer = bytearray(joined(produce(b"before"), 9))
    message = decode(ProduceRequest, buffer, 9)
    at = buffer.index(b"before")
    buffer[at : at + 6] = b"after!"
    assert message.topic_data[0].partition_data[0].records == b"after!"


def test_a_topic_id_survives() -> None:
    request = MetadataRequest(topics=[MetadataRequestTopic(topic_id=UUID(int=7), name=None)])
    assert decode(MetadataRequest, joined(request, 12), 12) == request


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2**31 - 1, 2**32, 2**35 - 1])
def test_varints(value: int) -> None:
    assert read_uvarint(memoryview(b"?" + uvarint(value) + b"?"), 1) == (value, 1 + len(uvarint(value)))


def test_a_varint_of_more_than_five_bytes() -> None:
    with pytest.raises(DecodeError):
        read_uvarint(memoryview(b"\xff" * 5 + b"\0"), 0)
