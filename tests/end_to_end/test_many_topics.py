"""A broker with many topics whose clients subscribe by patterns: everybody waits for short steps only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.protocol.messages.list_config_resources import ListConfigResourcesRequest
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.steps import in_short_steps

TOPICS = 1_500


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("many")) as process, GroupClient(process.port, 120) as client:
        made = [
            CreatableTopic(name=f"topic-{it:06d}-{'x' * 60}", num_partitions=1, replication_factor=1)
            for it in range(TOPICS)
        ]
        answer = client.call(CreateTopicsRequest(topics=made, timeout_ms=100_000))
        assert {it.error_code for it in answer.topics} == {ErrorCode.NONE}
        client.ready("patterns")
        yield process


def test_a_pattern_that_is_slow_to_match_is_matched_in_short_steps(broker: BrokerProcess) -> None:
    with GroupClient(broker.port, 60) as client:
        tries = iter(range(100))

        def join() -> None:
            number = next(tries)
            pattern = f"((a?){{100}}(a){{100}}){{5}}{number}|topic-0000{number:02d}-x*"
            answer = client.beat(f"patterns-{number}", f"m{number}", 0, subscribed_topic_regex=pattern)
            assert answer.error_code == ErrorCode.NONE, answer
            assert client.described(f"patterns-{number}").members[0].subscribed_topic_regex == pattern
            (assigned,) = answer.assignment.topic_partitions
            assert len(assigned.partitions) == 1

        in_short_steps(broker, join)


def test_matches_of_many_patterns_hold_bounded_memory(tmp_path: Path) -> None:
    with running(tmp_path, group_regex_matches_max_bytes=64 * 1024) as process, GroupClient(process.port, 60) as client:
        made = [CreatableTopic(name=f"topic-{it:03d}", num_partitions=1, replication_factor=1) for it in range(100)]
        client.call(CreateTopicsRequest(topics=made, timeout_ms=20_000))
        client.ready("g")
        for number in range(30):
            answer = client.beat(f"g{number}", "m", 0, subscribed_topic_regex=f"topic-.*|{number}")
            assert len(answer.assignment.topic_partitions) == 100
            held = process.metrics()["kafka_server_group_coordinator_metrics_regex_matches_bytes"]
            assert 0 < held <= 64 * 1024


@pytest.mark.parametrize("count", [199, 400])
def test_the_configs_of_many_topics_are_described_in_short_steps(broker: BrokerProcess, count: int) -> None:
    asked = [
        DescribeConfigsResource(resource_type=2, resource_name=f"topic-{it:06d}-{'x' * 60}", configuration_keys=None)
        for it in range(count)
    ]
    request = DescribeConfigsRequest(resources=asked, include_synonyms=True, include_documentation=True)
    with GroupClient(broker.port, 60) as client:
        answer = in_short_steps(broker, lambda: client.call(request))
        assert [it.resource_name for it in answer.results] == [it.resource_name for it in asked]
        assert min(len(it.configs) for it in answer.results) > 20


def test_members_that_subscribe_to_many_names_are_refused_in_short_steps(broker: BrokerProcess) -> None:
    with GroupClient(broker.port, 60) as client:
        joined = [
            client.beat("names", f"m{it}", 0, topics=[f"{it}-{name}" for name in range(3_000)]) for it in range(3)
        ]
        assert {it.error_code for it in joined} == {ErrorCode.NONE}
        several = [f"more-{name}" for name in range(3_000)]
        for names in (several, [f"many-{name}" for name in range(50_000)]):
            refused = in_short_steps(broker, lambda names=names: client.beat("names", "m4", 0, topics=names))
            assert refused.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
            assert "group.consumer.max.subscribed.names" in refused.error_message
        changed = client.beat("names", "m0", joined[0].member_epoch, topics=several)
        assert changed.error_code == ErrorCode.NONE, "a member may have others in place of its own"
        same = client.beat("names", "m5", 0, topics=several)
        assert same.error_code == ErrorCode.NONE, "equal subscriptions count once"


@pytest.mark.parametrize(
    "configs",
    [[("retention.ms", "1")] * 4_000, [("cleanup.policy", ",".join(["compact"] * 1_000_000))]],
    ids=["many", "large"],
)
def test_more_configs_than_a_resource_can_have_are_refused_in_short_steps(
    broker: BrokerProcess, configs: list[tuple[str, str]]
) -> None:
    given = [AlterableConfig(name=name, config_operation=0, value=value) for name, value in configs]
    asked = [AlterConfigsResource(resource_type=kind, resource_name="1", configs=given) for kind in (2, 4, 8, 32)]
    created = CreatableTopic(
        name="fresh",
        num_partitions=1,
        replication_factor=1,
        configs=[CreatableTopicConfig(name=name, value=value) for name, value in configs],
    )
    with GroupClient(broker.port, 60) as client:
        altered = in_short_steps(broker, lambda: client.call(IncrementalAlterConfigsRequest(resources=asked)))
        assert {it.error_code for it in altered.responses} == {ErrorCode.INVALID_REQUEST}
        refused = in_short_steps(broker, lambda: client.call(CreateTopicsRequest(topics=[created], timeout_ms=10_000)))
        assert refused.topics[0].error_code == ErrorCode.INVALID_REQUEST


def test_every_resource_is_listed_in_short_steps(broker: BrokerProcess) -> None:
    with GroupClient(broker.port, 60) as client:
        listed = in_short_steps(broker, lambda: client.call(ListConfigResourcesRequest(resource_types=[2])))
        names = [it.resource_name for it in listed.config_resources]
        assert len(names) >= TOPICS and names == sorted(names)
