"""A broker with many topics whose clients subscribe by patterns: everybody waits for short steps only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.describe_log_dirs import DescribeLogDirsRequest
from anabranch.protocol.messages.describe_topic_partitions import Cursor, DescribeTopicPartitionsRequest
from anabranch.protocol.messages.elect_leaders import ElectLeadersRequest
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.protocol.messages.list_config_resources import ListConfigResourcesRequest
from anabranch.protocol.messages.list_topic_resizes import ListTopicResizesRequest
from anabranch.protocol.messages.metadata import MetadataRequest
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.many_topics import write_topics
from tests.support.steps import LONG_STEPS, in_short_steps, long_steps
from tests.support.thorough import THOROUGH

TOPICS = 1_500
CROWD = 100_000 if THOROUGH else 12_000
"""As many topics as a broker may have, or so many that two microseconds for each of them are too long a step."""
UPKEEP_MS = 1_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data = tmp_path_factory.mktemp("many")
    write_topics(data, [f"{name_of(it)}-{'x' * 60}" for it in range(TOPICS)])
    with running(data) as process, GroupClient(process.port, 120) as client:
        client.ready("patterns")
        yield process


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data = tmp_path_factory.mktemp("crowded")
    write_topics(data, [name_of(it) for it in range(CROWD)])
    made = BrokerProcess(data, max_partitions_per_broker=CROWD + 1_000, log_retention_check_interval_ms=UPKEEP_MS)
    try:
        yield made.start(timeout_s=30 + CROWD / 500)
        assert made.stop() == 0 and not made.said("error")
    finally:
        if made.alive:
            made.kill()


def name_of(number: int) -> str:
    return f"topic-{number:06d}"


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
        DescribeConfigsResource(resource_type=2, resource_name=f"{name_of(it)}-{'x' * 60}", configuration_keys=None)
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
    [[("retention.ms", "1")] * 4_000, [(f"config.{number}", "x" * 32_000) for number in range(3)]],
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


def test_what_is_asked_of_all_of_very_many_topics_is_answered_in_short_steps(crowded: BrokerProcess) -> None:
    everything = [name_of(it) for it in range(CROWD)]
    cursor = Cursor(topic_name=name_of(CROWD // 2), partition_index=0)

    def ask() -> None:
        described = client.call(MetadataRequest(topics=None))
        assert [it.name for it in described.topics if not it.is_internal] == everything
        paged = DescribeTopicPartitionsRequest(topics=[], response_partition_limit=100, cursor=cursor)
        page = client.call(paged)
        assert [it.name for it in page.topics] == everything[CROWD // 2 :][:100]
        assert page.next_cursor == Cursor(topic_name=name_of(CROWD // 2 + 100), partition_index=0)
        listed = client.call(ListConfigResourcesRequest(resource_types=[2]))
        assert {it.resource_name for it in listed.config_resources}.issuperset(everything)
        sizes = client.call(DescribeLogDirsRequest(topics=None))
        assert {it.name for it in sizes.results[0].topics}.issuperset(everything)
        elected = client.call(ElectLeadersRequest(election_type=0, topic_partitions=None))
        assert (elected.error_code, list(elected.replica_election_results)) == (ErrorCode.NONE, [])
        for topics in (None, everything[:20_000]):
            assert list(client.call(ListTopicResizesRequest(topics=topics)).topics) == []

    with GroupClient(crowded.port, 60) as client:
        refused = client.call(ElectLeadersRequest(election_type=9, topic_partitions=None))
        assert refused.error_code == ErrorCode.INVALID_REQUEST
        assert {it.topic for it in refused.replica_election_results}.issuperset(everything)
        in_short_steps(crowded, ask)


def test_a_default_of_very_many_topics_is_changed_in_short_steps(crowded: BrokerProcess) -> None:
    retentions, numbers = iter(range(10**9, 2 * 10**9)), iter(range(CROWD))

    def alter() -> None:
        changed = AlterableConfig(name="log.retention.ms", config_operation=0, value=str(next(retentions)))
        every_broker = AlterConfigsResource(resource_type=4, resource_name="", configs=[changed])
        sent = client.send(IncrementalAlterConfigsRequest(resources=[every_broker]))
        for number in islice(numbers, 30):  # The first ones, while the topics are looked at.
            joined = member.beat(f"g{number}", "m", 0, subscribed_topic_regex=f"{name_of(number)}|{number}")
            assert len(joined.assignment.topic_partitions) == 1, joined
        assert client.receive(sent).responses[0].error_code == ErrorCode.NONE
        time.sleep(UPKEEP_MS / 1_000)

    with GroupClient(crowded.port, 60) as client, GroupClient(crowded.port, 60) as member:
        member.ready()
        assert long_steps(crowded).get(f'{LONG_STEPS}{{work="ShardSet._create"}}', 0) < 10, "there are 50 shards"
        in_short_steps(crowded, alter)
