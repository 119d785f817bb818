"""Every API has a bound on the elements of its requests, and the reader keeps it."""

from __future__ import annotations

import pytest

from anabranch.base.errors import DecodeError
from anabranch.protocol.bounds import ELEMENTS_MAX, TOPICS_MAX
from anabranch.protocol.frames import decode_request, encode_request
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from anabranch.protocol.registry import API


def test_every_api_has_a_bound() -> None:
    assert ELEMENTS_MAX.keys() == API.keys()


def decoded(count: int, tags: int = 0) -> None:
    protocols = [JoinGroupRequestProtocol(name="p", unknown_tags={900 + it: b"" for it in range(tags)})] * count
    parts = encode_request(JoinGroupRequest(group_id="g", protocols=protocols), 9, 1, "c")
    decode_request(b"".join(bytes(part) for part in parts)[4:])


def test_elements_and_fields_that_nobody_knows_are_counted_together() -> None:
    bound = ELEMENTS_MAX[11]
    decoded(bound)
    decoded(bound // 10, tags=9)
    for count, tags in ((bound + 1, 0), (bound // 10, 10)):
        with pytest.raises(DecodeError, match="more elements than its API allows"):
            decoded(count, tags)


def test_topics_that_are_created_have_a_bound_of_their_own() -> None:
    for count in (TOPICS_MAX[19], TOPICS_MAX[19] + 1):
        topics = [CreatableTopic(name="t", num_partitions=1, replication_factor=1)] * count
        parts = encode_request(CreateTopicsRequest(topics=topics), 7, 1, "c")
        frame = b"".join(bytes(part) for part in parts)[4:]
        if count == TOPICS_MAX[19]:
            assert len(decode_request(frame)[1].topics) == count
        else:
            with pytest.raises(DecodeError, match="names 20001 topics, and may name 20000"):
                decode_request(frame)
