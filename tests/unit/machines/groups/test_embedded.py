"""The consumer protocol that JoinGroup and SyncGroup carry, as a coordinator reads and writes it."""

from __future__ import annotations

import pytest

from anabranch.base.errors import DecodeError
from anabranch.machines.groups import embedded
from tests.support.groups import assignment, subscription, topic_id, topics

IMAGE = topics(foo=4, bar=2)


def test_a_subscription_is_read_with_its_version() -> None:
    version, read = embedded.subscription(subscription("foo", "bar", owned="foo-1", generation=7))
    assert (version, list(read.topics), read.generation_id) == (3, ["foo", "bar"], 7)
    assert [(it.topic, list(it.partitions)) for it in read.owned_partitions] == [("foo", [1])]


def test_a_version_from_the_future_is_read_as_the_newest_that_is_known() -> None:
    data = (9).to_bytes(2) + subscription("foo")[2:]
    version, read = embedded.subscription(data)
    assert (version, list(read.topics)) == (embedded.VERSION_MAX, ["foo"])


def test_an_assignment_names_topics_that_exist_by_id_and_all_by_name() -> None:
    data = assignment("foo-2 foo-0 gone-1")
    assert embedded.assigned(data, IMAGE) == ((topic_id("foo"), (0, 2)),)
    assert embedded.assigned_by_name(data) == {"foo": {0, 2}, "gone": {1}}


def test_an_empty_assignment_is_nothing() -> None:
    assert embedded.assigned(b"", IMAGE) == ()
    assert embedded.assigned_by_name(b"") == {}


def test_what_is_written_is_read_back_and_topics_that_are_gone_are_left_out() -> None:
    target = ((topic_id("foo"), (0, 3)), (topic_id("gone"), (1,)))
    data = embedded.assignment_data(target, IMAGE, version=1)
    assert data[:2] == b"\x00\x01"
    assert embedded.assigned_by_name(data) == {"foo": {0, 3}}


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff\xff" + bytes(8), b"\x00\x03", b"\x00\x00\x7f\xff\xff\xff"])
def test_bytes_that_are_no_subscription_raise_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        embedded.subscription(data)


@pytest.mark.parametrize("data", [b"\x00", b"\xff\xff" + bytes(8), b"\x00\x03\x7f\xff\xff\xff"])
def test_bytes_that_are_no_assignment_raise_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        embedded.assigned(data, IMAGE)
