"""Well-formed requests for what cannot be: each is answered with its error, and the connection goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.alter_configs import AlterableConfig, AlterConfigsRequest, AlterConfigsResource
from anabranch.protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from anabranch.protocol.messages.delete_records import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.incremental_alter_configs import AlterableConfig as Altered
from anabranch.protocol.messages.incremental_alter_configs import AlterConfigsResource as AlteredResource
from anabranch.protocol.messages.incremental_alter_configs import IncrementalAlterConfigsRequest
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

TOPIC, SET, DELETE = 2, 0, 1


@pytest.fixture
def wire(broker: BrokerProcess) -> Iterator[WireClient]:
    with WireClient(broker.port) as connection:
        yield connection
        connection.call(MetadataRequest(topics=[]), 9)
    assert not broker.said("error"), broker.said("error")


@pytest.mark.parametrize("version", range(10, 14))
def test_metadata_of_an_id_that_no_topic_has(wire: WireClient, version: int) -> None:
    """Versions 10 and 11 have no null for the name that there is not: the answer could not be written."""
    asked = MetadataRequestTopic(topic_id=UUID(int=7), name=None)
    [found] = wire.call(MetadataRequest(topics=[asked]), version).topics
    assert (found.error_code, found.topic_id) == (ErrorCode.UNKNOWN_TOPIC_ID, UUID(int=7))
    assert found.name == (None if version >= 12 else "")


@pytest.mark.parametrize(
    ("producer_id", "epoch", "error"),
    [
        (-1, 0, ErrorCode.INVALID_REQUEST),
        (-(2**63), 0, ErrorCode.INVALID_REQUEST),
        (5, -1, ErrorCode.INVALID_PRODUCER_EPOCH),
    ],
)
def test_a_marker_of_no_producer_is_refused(wire: WireClient, producer_id: int, epoch: int, error: ErrorCode) -> None:
    wire.create("marked", partitions=1)
    wire.resize("marked", 3)
    topic = WritableTxnMarkerTopic(name="marked", partition_indexes=[0, 2])
    marker = WritableTxnMarker(
        producer_id=producer_id, producer_epoch=epoch, transaction_result=True, topics=[topic], coordinator_epoch=-1
    )
    [result] = wire.call(WriteTxnMarkersRequest(markers=[marker]), 1).markers
    assert [it.error_code for it in result.topics[0].partitions] == [error] * 2
    assert wire.produce("marked", 0, batch([b"next"])).base_offset == 0, "nothing was written"


def test_markers_that_clients_write_again_and_again_take_few_lines(broker: BrokerProcess, wire: WireClient) -> None:
    event = "markers written for a client"
    marker = WritableTxnMarker(producer_id=5, producer_epoch=0, transaction_result=True, coordinator_epoch=-1)
    for _ in range(200):
        wire.call(WriteTxnMarkersRequest(markers=[]), 1)
        wire.call(WriteTxnMarkersRequest(markers=[marker]), 1)
    (said, *more) = broker.said("warning", event)
    assert said["markers"] >= 1 and len(more) < 5


def test_records_of_a_topic_that_is_compacted_only_are_not_deleted(wire: WireClient) -> None:
    """Its last record of a key says what the key is now; Kafka refuses it the same way."""
    for policy, error in (("compact", ErrorCode.POLICY_VIOLATION), ("compact,delete", 0), ("delete", 0)):
        name = f"kept-{policy.replace(',', '-')}"
        wire.create(name, **{"cleanup.policy": policy})
        wire.produce(name, 0, batch([b"value"], key=b"key"))
        topics = [DeleteRecordsTopic(name=name, partitions=[DeleteRecordsPartition(partition_index=0, offset=1)])]
        [result] = wire.call(DeleteRecordsRequest(topics=topics, timeout_ms=5_000), 2).topics[0].partitions
        assert (result.error_code, result.low_watermark) == (error, -1 if error else 1)


def test_the_log_of_a_coordinator_stays_as_durable_as_the_broker_says(wire: WireClient) -> None:
    """Anybody could have commits that were answered for lost with the power."""
    offsets = "__consumer_offsets"
    while wire.call(FindCoordinatorRequest(key="group"), 3).error_code:
        pass
    wire.create("mine")

    def altered(topic: str, value: str) -> tuple[int, str]:
        change = Altered(name="durability", config_operation=SET, value=value)
        resource = AlteredResource(resource_type=TOPIC, resource_name=topic, configs=[change])
        [answer] = wire.call(IncrementalAlterConfigsRequest(resources=[resource]), 1).responses
        return answer.error_code, answer.error_message or ""

    code, message = altered(offsets, "os")
    assert code == ErrorCode.INVALID_CONFIG and "must be inherit or fsync, not 'os'" in message
    replaced = AlterConfigsResource(
        resource_type=TOPIC, resource_name=offsets, configs=[AlterableConfig(name="durability", value="os")]
    )
    [answer] = wire.call(AlterConfigsRequest(resources=[replaced]), 2).responses
    assert answer.error_code == ErrorCode.INVALID_CONFIG
    assert altered(offsets, "fsync") == altered(offsets, "inherit") == altered("mine", "os") == (0, "")


def test_segments_of_a_few_records_are_refused_by_default(tmp_path: Path) -> None:
    """Each would be three files."""
    broker = BrokerProcess(tmp_path)
    del broker.settings["log.segment.min.bytes"]

    def created(client: WireClient, name: str, size: str) -> tuple[int, str]:
        configs = [CreatableTopicConfig(name="segment.bytes", value=size)]
        asked = CreatableTopic(name=name, num_partitions=1, replication_factor=1, configs=configs)
        [answer] = client.call(CreateTopicsRequest(topics=[asked], timeout_ms=5_000)).topics
        return answer.error_code, answer.error_message or ""

    def altered(client: WireClient, size: str) -> tuple[int, str]:
        change = Altered(name="segment.bytes", config_operation=SET, value=size)
        resource = AlteredResource(resource_type=TOPIC, resource_name="large", configs=[change])
        [answer] = client.call(IncrementalAlterConfigsRequest(resources=[resource]), 1).responses
        return answer.error_code, answer.error_message or ""

    try:
        broker.start()
        with WireClient(broker.port) as client:
            assert created(client, "large", "1048576") == (0, "")
            for code, message in (created(client, "small", "14"), altered(client, "14"), altered(client, "1048575")):
                assert code == ErrorCode.INVALID_CONFIG
                assert "log.segment.min.bytes (1048576)" in message
            assert client.metadata("small").error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert broker.stop() == 0
    finally:
        broker.kill()


@pytest.mark.parametrize(("log", "key_type"), [("__consumer_offsets", 0), ("__transaction_state", 1)])
def test_the_log_of_a_coordinator_stays_compacted(wire: WireClient, log: str, key_type: int) -> None:
    """Anybody could have commits deleted by age, and a group would begin anew, or transactions that are open."""
    while wire.call(FindCoordinatorRequest(key="id", key_type=key_type), 3).error_code:
        pass

    def altered(operation: int, value: str | None) -> tuple[int, str]:
        change = Altered(name="cleanup.policy", config_operation=operation, value=value)
        resource = AlteredResource(resource_type=TOPIC, resource_name=log, configs=[change])
        [answer] = wire.call(IncrementalAlterConfigsRequest(resources=[resource]), 1).responses
        return answer.error_code, answer.error_message or ""

    for value in ("delete", "compact,delete", "delete,compact"):
        code, message = altered(SET, value)
        assert code == ErrorCode.INVALID_CONFIG
        assert "must be compact" in message
    assert altered(DELETE, None) == (0, "")
    assert altered(SET, "compact") == (0, "")
    replaced = AlterConfigsResource(
        resource_type=TOPIC, resource_name=log, configs=[AlterableConfig(name="retention.ms", value="1")]
    )
    wire.call(AlterConfigsRequest(resources=[replaced]), 2)
    named = DescribeConfigsResource(resource_type=TOPIC, resource_name=log, configuration_keys=["cleanup.policy"])
    [described] = wire.call(DescribeConfigsRequest(resources=[named]), 4).results
    assert [config.value for config in described.configs] == ["compact"]
