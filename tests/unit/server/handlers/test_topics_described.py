"""Metadata, DescribeTopicPartitions and DescribeCluster: what they say of a view, page by page."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID
from anabranch.machines.controller import terms, topics
from anabranch.machines.controller.folding import HeldLayouts, decide_fold_layouts
from anabranch.machines.controller.nodes import BrokerNode
from anabranch.protocol.messages.describe_cluster import DescribeClusterRequest
from anabranch.protocol.messages.describe_topic_partitions import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    TopicRequest,
)
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from anabranch.server.context import ANONYMOUS, PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext
from anabranch.server.handlers.cluster import handle_describe_cluster
from anabranch.server.handlers.describe_topic_partitions import handle_describe_topic_partitions
from anabranch.server.handlers.metadata import handle_metadata
from tests.unit.machines.controller.transcript import TOPIC_ID
from tests.unit.server.cluster.test_view import Published

CALL = RequestContext(ANONYMOUS, None, "peer:1", 1, 12)


def broker_of(cluster: Published) -> BrokerContext:
    settings = SimpleNamespace(auto_create_topics_enable=False)
    return cast(BrokerContext, SimpleNamespace(view=cluster.view, cluster_id="a-cluster", settings=settings))


def two_topics() -> Published:
    """Topics t, of 2 partitions, and u, of 3, on a broker that clients can reach."""
    cluster = Published(partitions=2)
    command = topics.CreateTopic("u", UUID(int=2), 3)
    cluster.submit(lambda state: topics.decide_create_topic(state, command))
    cluster.run()
    node = BrokerNode(5, 1, "rack", ("PLAINTEXT://example.org:9095",))
    cluster.submit(lambda state: terms.decide_register_broker(state, node))
    return cluster


def metadata(cluster: Published, request: MetadataRequest) -> MetadataResponse:
    response = handle_metadata(broker_of(cluster), request, CALL)
    if asyncio.iscoroutine(response):
        response = asyncio.run(response)
    assert isinstance(response, MetadataResponse)
    return response


def pages(cluster: Published, limit: int, *names: str) -> list[list[tuple[str, list[int]]]]:
    """What each page has: topics with their partitions."""
    found: list[list[tuple[str, list[int]]]] = []
    cursor: Cursor | None = None
    while True:
        request = DescribeTopicPartitionsRequest(
            topics=[TopicRequest(name=name) for name in names], response_partition_limit=limit, cursor=cursor
        )
        response = handle_describe_topic_partitions(broker_of(cluster), request, CALL)
        assert isinstance(response, DescribeTopicPartitionsResponse)
        found.append([(it.name or "", [p.partition_index for p in it.partitions]) for it in response.topics])
        cursor = response.next_cursor
        if cursor is None:
            return found


def test_metadata_of_everything_has_all_topics_and_brokers() -> None:
    response = metadata(two_topics(), MetadataRequest(topics=None))
    assert [(it.name, len(it.partitions)) for it in response.topics] == [("t", 2), ("u", 3)]
    assert [(it.node_id, it.host, it.port, it.rack) for it in response.brokers] == [(5, "example.org", 9095, "rack")]
    assert (response.cluster_id, response.controller_id) == ("a-cluster", -1)


def test_metadata_finds_topics_by_name_and_by_id_and_says_what_it_does_not_know() -> None:
    asked = [
        MetadataRequestTopic(name="u"),
        MetadataRequestTopic(name=None, topic_id=TOPIC_ID),
        MetadataRequestTopic(name="unknown"),
        MetadataRequestTopic(name=None, topic_id=UUID(int=77)),
    ]
    response = metadata(two_topics(), MetadataRequest(topics=asked))
    assert [(it.name, it.error_code) for it in response.topics] == [
        ("u", ErrorCode.NONE),
        ("t", ErrorCode.NONE),
        ("unknown", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (None, ErrorCode.UNKNOWN_TOPIC_ID),
    ]


def test_a_topic_that_is_named_many_times_is_described_once() -> None:
    """A small request would else be answered with gigabytes."""
    asked = [MetadataRequestTopic(name="u"), MetadataRequestTopic(name="t")] * 1_000
    assert [it.name for it in metadata(two_topics(), MetadataRequest(topics=asked)).topics] == ["u", "t"]


def test_missing_topics_are_told_from_those_that_cannot_be_made_however_many_are_asked_for() -> None:
    cluster = two_topics()
    cluster.submit(lambda state: topics.decide_delete_topic(state, topics.DeleteTopic("u")))
    made: list[str] = []

    async def create(command: topics.CreateTopic, timeout_ms: int) -> None:
        made.append(command.name)
        raise ApiError(ErrorCode.POLICY_VIOLATION)

    broker = SimpleNamespace(
        view=cluster.view,
        cluster_id="a-cluster",
        settings=SimpleNamespace(auto_create_topics_enable=True),
        commands=SimpleNamespace(create_topic=create),
        chance=SimpleNamespace(uuid=lambda: UUID(int=9)),
    )

    async def told(*names: str) -> dict[str | None, int]:
        request = MetadataRequest(topics=[MetadataRequestTopic(name=name) for name in names])
        answer = handle_metadata(cast(BrokerContext, broker), request, CALL)
        found = answer if isinstance(answer, MetadataResponse | Large) else await answer
        response = found.make() if isinstance(found, Large) else found
        return {topic.name: topic.error_code for topic in response.topics}

    bad = {"a/b": ErrorCode.INVALID_TOPIC_EXCEPTION, "u": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    many = ["t"] * PARTITIONS_AT_A_TIME
    assert asyncio.run(told("a/b", "u")) == bad
    assert asyncio.run(told("a/b", "u", *many)) == {**bad, "t": ErrorCode.NONE}
    assert not made
    assert asyncio.run(told("a/b", "u", "new")) == {**bad, "new": ErrorCode.POLICY_VIOLATION}
    assert made == ["new"]


def test_layouts_say_their_numbers_where_they_do_not_follow() -> None:
    cluster = Published(partitions=2)
    for count in (4, 3, 5):
        cluster.resize(count)
        cluster.run()
    topic = cluster.state.topics["t"]
    report = HeldLayouts(TOPIC_ID, 3, frozenset({1}), frozenset(topic.partitions))
    cluster.submit(lambda state: decide_fold_layouts(state, "t", report))
    asked = [MetadataRequestTopic(name="t")]
    (found,) = metadata(cluster, MetadataRequest(topics=asked, include_lineage=True)).topics
    assert [(it.count, it.number) for it in found.layouts] == [(4, 1), (5, 3)]
    (plain,) = metadata(cluster, MetadataRequest(topics=asked)).topics
    assert plain.layouts == []


def test_a_lineage_is_in_metadata_only_on_request() -> None:
    cluster = Published(partitions=2)
    cluster.resize(4)
    cluster.run()
    asked = [MetadataRequestTopic(name="t")]
    (plain,) = metadata(cluster, MetadataRequest(topics=asked)).topics
    assert (plain.undeleted_partition_count, list(plain.layouts)) == (COUNT_NOT_SAID, [])
    (full,) = metadata(cluster, MetadataRequest(topics=asked, include_lineage=True)).topics
    assert (full.undeleted_partition_count, [it.count for it in full.layouts]) == (4, [2, 4])


def test_a_topic_is_described_once_for_each_snapshot_of_it() -> None:
    cluster = Published(partitions=2)
    request = MetadataRequest(topics=[MetadataRequestTopic(name="t")])
    (first,), (again,) = metadata(cluster, request).topics, metadata(cluster, request).topics
    assert again is first
    cluster.resize(4)
    cluster.run()
    (later,) = metadata(cluster, request).topics
    assert len(later.partitions) == 4


def test_pages_of_partitions_hold_the_limit_and_go_on_where_the_last_one_ended() -> None:
    cluster = two_topics()
    assert pages(cluster, 100) == [[("t", [0, 1]), ("u", [0, 1, 2])]]
    assert pages(cluster, 3) == [[("t", [0, 1]), ("u", [0])], [("u", [1, 2])]]
    assert pages(cluster, 2) == [[("t", [0, 1])], [("u", [0, 1])], [("u", [2])]]
    assert pages(cluster, 0) == [
        [(name, [number])] for name, number in (("t", 0), ("t", 1), ("u", 0), ("u", 1), ("u", 2))
    ]
    assert pages(cluster, 100, "u", "unknown", "u") == [[("u", [0, 1, 2]), ("unknown", [])]]


def test_the_cluster_is_described_to_clients_and_not_as_a_controller() -> None:
    broker = broker_of(two_topics())
    described = handle_describe_cluster(broker, DescribeClusterRequest(endpoint_type=1), CALL)
    assert [(it.broker_id, it.host, it.port, it.rack) for it in described.brokers] == [(5, "example.org", 9095, "rack")]
    refused = handle_describe_cluster(broker, DescribeClusterRequest(endpoint_type=2), CALL)
    assert refused.error_code == ErrorCode.MISMATCHED_ENDPOINT_TYPE
