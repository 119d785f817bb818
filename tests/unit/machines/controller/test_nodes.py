"""The JSON of the tree, and what becomes of nodes that are not what they should be."""

from __future__ import annotations

import contextlib
import json
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.base.errors import DecodeError
from anabranch.machines.controller import nodes
from anabranch.machines.controller.layouts import EpochRun, Layout
from anabranch.machines.controller.nodes import BrokerNode, PartitionNode, Phase, PutNode, Removed, Resize, Topic
from anabranch.machines.controller.state import ControllerState, apply

TOPIC = Topic(
    "t",
    UUID("01234567-89ab-cdef-0123-456789abcdef"),
    {0: (1,), 1: (2,)},
    1,
    (Layout(0, 1), Layout(1, 2), Layout(2, 3)),
    {0: (EpochRun(0, 4, 2),), 1: (EpochRun(1, 0, 1),)},
    Resize(3, Phase.CUT, {2: (1,)}),
    {2: Removed(9, 1)},
)


def test_a_topic_node_is_the_proposals_with_what_we_add() -> None:
    assert json.loads(nodes.put_topic(TOPIC).data) == {
        "version": 4,
        "topic_id": "ASNFZ4mrze8BI0VniavN7w",
        "partitions": {"0": [1], "1": [2]},
        "initial_partition_count": 1,
        "undeleted_partition_count": 3,
        "layouts": [[0, 1], [1, 2], [2, 3]],
        "ended_epochs": {"0": [[0, 4, 2]], "1": [[1, 0, 1]]},
        "resize": {"to": 3, "phase": "cut", "assignment": {"2": [1]}},
        "removed": {"2": {"next_offset": 9, "leader_epoch": 1}},
    }


def test_what_is_written_is_read() -> None:
    assert nodes.read_topic("t", nodes.put_topic(TOPIC).data) == TOPIC
    partition = PartitionNode(1, 2, (1, 3), 4, 5)
    assert nodes.read_partition("", nodes.put_partition("t", 0, partition).data) == partition
    broker = BrokerNode(3, 4, "rack", ("PLAINTEXT://a:1",))
    assert nodes.read_broker(3, nodes.put_broker(broker).data) == broker
    assert nodes.read_configs("", nodes.put_configs("t", {"b": "2", "a": "1"}).data) == {"a": "1", "b": "2"}


def test_a_topic_node_that_knows_nothing_of_resizing_is_a_topic_that_was_never_resized() -> None:
    plain = b'{"version":3,"topic_id":"ASNFZ4mrze8BI0VniavN7w","partitions":{"0":[1],"1":[1]},"adding_replicas":{}}'
    topic = nodes.read_topic("t", plain)
    assert (topic.initial_partition_count, topic.layouts, topic.resize, topic.removed) == (2, (Layout(0, 2),), None, {})


def test_a_topic_node_with_the_epochs_of_every_layout_beside_its_count_is_read() -> None:
    before = json.loads(nodes.put_topic(TOPIC).data)
    before |= {
        "version": 3,
        "layouts": [
            {"count": 1, "ended_epochs": {"0": 4}},
            {"count": 2, "ended_epochs": {"0": 5, "1": 0, "2": 7}},
            {"count": 3, "ended_epochs": {}},
        ],
    }
    del before["ended_epochs"]
    assert nodes.read_topic("t", json.dumps(before).encode()) == TOPIC, "without the epochs of partitions removed since"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b'{"topic_id":"x","partitions":{"0":[1]}}',
        b'{"topic_id":"ASNFZ4mrze8BI0VniavN7w","partitions":{}}',
        b'{"topic_id":"ASNFZ4mrze8BI0VniavN7w","partitions":{"1":[1]}}',
        b'{"topic_id":"ASNFZ4mrze8BI0VniavN7w","partitions":{"0":1}}',
        b'{"topic_id":"ASNFZ4mrze8BI0VniavN7w","partitions":{"0":[1]},"layouts":[]}',
        b'{"topic_id":"ASNFZ4mrze8BI0VniavN7w","partitions":{"0":[1]},"resize":{"to":2,"phase":"jump"}}',
        b"[" * 100_000,
    ],
)
def test_a_broken_node_is_an_error_that_names_it(data: bytes) -> None:
    with pytest.raises(DecodeError, match="/brokers/topics/t "):
        nodes.read_topic("t", data)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_is_a_node_or_an_error(content: object) -> None:
    data = json.dumps(content).encode()
    for path in ("/brokers/topics/t", "/brokers/topics/t/partitions/0/state", "/brokers/ids/1", "/config/topics/t"):
        with contextlib.suppress(DecodeError):
            apply(ControllerState(), PutNode(path, data))


def test_nodes_that_are_none_of_ours_change_nothing() -> None:
    state = apply(ControllerState(), PutNode("/consumers/x", b"anything"))
    assert apply(state, PutNode("/brokers/seqid", b"")) == ControllerState()
