"""No step on the loop of a real broker takes 10 ms of the processor, whatever becomes of a topic of 12,000 partitions.

A broker may have 100,000. What takes a microsecond for each partition, and is not divided, shows at 12,000.
"""

from __future__ import annotations

import time
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient

TOPIC, COUNT = "wide", 12_000
TIMEOUT_MS, TIMEOUT_S = 112_000, 120.0
UPKEEP_MS = 300
PARTITIONS = "kafka_server_replicamanager_partitioncount"


def resize(client: WireClient, count: int) -> None:
    asked = CreatePartitionsRequest(topics=[CreatePartitionsTopic(name=TOPIC, count=count)], timeout_ms=TIMEOUT_MS)
    assert client.call(asked).results[0].error_code == ErrorCode.NONE


def alter(client: WireClient, retention_ms: int) -> None:
    configs = [AlterableConfig(name="retention.ms", config_operation=0, value=str(retention_ms))]
    resource = AlterConfigsResource(resource_type=2, resource_name=TOPIC, configs=configs)
    assert client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses[0].error_code == ErrorCode.NONE


def until_partitions(broker: BrokerProcess, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while broker.metrics()[PARTITIONS] != count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_wide_topic_is_configured_emptied_kept_up_and_deleted_in_short_steps(tmp_path: Path) -> None:
    with running(tmp_path, log_retention_check_interval_ms=UPKEEP_MS) as broker, WireClient(broker.port, 120) as client:
        client.create(TOPIC, COUNT)
        retentions = iter(range(1_000_000, 2_000_000))
        in_short_steps(broker, lambda: alter(client, next(retentions)))

        def made_and_deleted() -> None:
            client.create(TOPIC, COUNT)
            doomed = DeleteTopicsRequest(topics=[DeleteTopicState(name=TOPIC)], timeout_ms=TIMEOUT_MS)
            assert client.call(doomed).responses[0].error_code == ErrorCode.NONE

        client.call(DeleteTopicsRequest(topics=[DeleteTopicState(name=TOPIC)], timeout_ms=TIMEOUT_MS))
        in_short_steps(broker, made_and_deleted)
        client.create(TOPIC, 1)

        def there_and_back() -> None:
            resize(client, COUNT)
            resize(client, 1)
            until_partitions(broker, 1)
            time.sleep(2 * UPKEEP_MS / 1000)  # The upkeep forgets what is remembered of the partitions removed.

        in_short_steps(broker, there_and_back)
