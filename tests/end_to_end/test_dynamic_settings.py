"""Settings of the broker, and levels of its loggers, that a stock admin client changes while the broker runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.alter_configs import AlterableConfig as ReplacedConfig
from anabranch.protocol.messages.alter_configs import AlterConfigsRequest
from anabranch.protocol.messages.alter_configs import AlterConfigsResource as ReplacedResource
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch

TIMEOUT_S = 20


TOPIC, BROKER, LOGGER = 2, 4, 8
SET, DELETE = 0, 1


def altered(client: WireClient, kind: int, name: str, setting: str, value: str | None) -> int:
    """What librdkafka cannot ask for: all brokers, another broker, loggers."""
    operation = DELETE if value is None else SET
    config = AlterableConfig(name=setting, config_operation=operation, value=value)
    resource = AlterConfigsResource(resource_type=kind, resource_name=name, configs=[config])
    [answer] = client.call(IncrementalAlterConfigsRequest(resources=[resource]), 1).responses
    return int(answer.error_code)


def replaced(client: WireClient, kind: int, name: str, **settings: str) -> int:
    """Replace all configs of a resource (AlterConfigs); names have `_` for `.`."""
    configs = [ReplacedConfig(name=key.replace("_", "."), value=value) for key, value in settings.items()]
    resource = ReplacedResource(resource_type=kind, resource_name=name, configs=configs)
    [answer] = client.call(AlterConfigsRequest(resources=[resource]), 2).responses
    return int(answer.error_code)


def described(client: WireClient, kind: int, name: str) -> dict[str, str | None]:
    resource = DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=None)
    [answer] = client.call(DescribeConfigsRequest(resources=[resource]), 4).results
    return {config.name: config.value for config in answer.configs}


class Tool:
    """What an administrator does with librdkafka."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{broker.port}"})

    def described(self, kind: ResourceType, name: str) -> dict[str, ConfigEntry]:
        [answer] = self._admin.describe_configs([ConfigResource(kind, name)]).values()
        found: dict[str, ConfigEntry] = answer.result(TIMEOUT_S)
        return found

    def set(self, kind: ResourceType, name: str, setting: str, value: str | None) -> None:
        operation = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        entry = ConfigEntry(setting, value or "", incremental_operation=operation)
        wanted = ConfigResource(kind, name, incremental_configs=[entry])
        [answer] = self._admin.incremental_alter_configs([wanted]).values()
        answer.result(TIMEOUT_S)

    def replace(self, kind: ResourceType, name: str, **settings: str) -> None:
        """As librdkafka's and rust-rdkafka's own tests do, by AlterConfigs."""
        wanted = ConfigResource(kind, name, set_config={key.replace("_", "."): it for key, it in settings.items()})
        with pytest.deprecated_call():
            [answer] = self._admin.alter_configs([wanted]).values()
        answer.result(TIMEOUT_S)

    def refused(self, kind: ResourceType, name: str, setting: str, value: str) -> int:
        with pytest.raises(KafkaException) as refusal:
            self.set(kind, name, setting, value)
        return int(refusal.value.args[0].code())


def test_a_setting_is_changed_for_all_brokers_and_for_one_and_lives_through_a_restart(tmp_path: Path) -> None:
    large = batch([bytes(5_000)])

    def error(client: WireClient) -> int:
        return int(client.produce("limited", 0, large).error_code)

    kind = ResourceType.BROKER
    with running(tmp_path, message_max_bytes=2_000_000) as broker, WireClient(broker.port) as client:
        tool = Tool(broker)
        client.create("limited")
        client.create("free", **{"max.message.bytes": "100000"})
        assert altered(client, BROKER, "", "message.max.bytes", "1000") == 0
        assert error(client) == ErrorCode.MESSAGE_TOO_LARGE
        assert client.produce("free", 0, large).error_code == 0, "a topic's own config counts first"
        tool.set(kind, "1", "message.max.bytes", "6000")
        assert error(client) == 0
        assert described(client, BROKER, "") == {"message.max.bytes": "1000"}
        own = tool.described(kind, "1")["message.max.bytes"]
        assert (own.value, own.source, own.is_read_only) == ("6000", ConfigSource.DYNAMIC_BROKER_CONFIG.value, False)
        assert [it.value for it in own.synonyms.values()][-1] == "1048588"
        assert tool.described(kind, "1")["listeners"].is_read_only
    with running(tmp_path, message_max_bytes=2_000_000) as broker, WireClient(broker.port) as client:
        tool = Tool(broker)
        assert error(client) == 0
        tool.set(kind, "1", "message.max.bytes", None)
        assert error(client) == ErrorCode.MESSAGE_TOO_LARGE
        assert altered(client, BROKER, "", "message.max.bytes", None) == 0
        assert error(client) == 0
        assert tool.described(kind, "1")["message.max.bytes"].value == "2000000"


def test_all_settings_of_a_broker_are_replaced(broker: BrokerProcess, client: WireClient) -> None:
    """As librdkafka's test 0081 and rust-rdkafka's `test_configs` do."""
    tool, kind = Tool(broker), ResourceType.BROKER

    def told(name: str) -> tuple[str, int]:
        found = tool.described(kind, "1")[name]
        assert not found.is_read_only
        return found.value, found.source

    default = told("log.flush.interval.messages")
    assert default == (str(2**63 - 1), ConfigSource.DEFAULT_CONFIG.value)
    tool.replace(kind, "1", sasl_kerberos_min_time_before_relogin="58000")
    assert told("sasl.kerberos.min.time.before.relogin") == ("58000", ConfigSource.DYNAMIC_BROKER_CONFIG.value)
    tool.replace(kind, "1", log_flush_interval_messages="1234")
    assert told("log.flush.interval.messages") == ("1234", ConfigSource.DYNAMIC_BROKER_CONFIG.value)
    assert told("sasl.kerberos.min.time.before.relogin") == ("60000", ConfigSource.DEFAULT_CONFIG.value)
    tool.replace(kind, "1", log_flush_interval_ms=default[0])
    assert told("log.flush.interval.messages") == default
    assert told("log.flush.interval.ms") == (default[0], ConfigSource.DYNAMIC_BROKER_CONFIG.value)
    assert replaced(client, BROKER, "", log_roll_ms="700000") == 0
    assert described(client, BROKER, "") == {"log.roll.ms": "700000"}
    assert described(client, BROKER, "1")["log.roll.ms"] == "700000"
    assert replaced(client, BROKER, "1") == replaced(client, BROKER, "") == 0
    assert described(client, BROKER, "") == {}
    assert replaced(client, BROKER, "7", log_roll_ms="700000") == ErrorCode.INVALID_REQUEST
    assert replaced(client, BROKER, "1", listeners="x:1") == ErrorCode.INVALID_REQUEST
    assert replaced(client, BROKER, "1", log_roll_ms="soon") == ErrorCode.INVALID_CONFIG
    assert replaced(client, LOGGER, "1", anabranch="INFO") == ErrorCode.INVALID_REQUEST, "as Kafka does"


def test_what_cannot_be_set_is_refused(broker: BrokerProcess, client: WireClient) -> None:
    tool, kind = Tool(broker), ResourceType.BROKER
    assert tool.refused(kind, "1", "listeners", "localhost:1") == ErrorCode.INVALID_REQUEST
    assert tool.refused(kind, "1", "message.max.bytes", "much") == ErrorCode.INVALID_CONFIG
    assert tool.refused(kind, "1", "no.such.setting", "1") == ErrorCode.INVALID_CONFIG
    assert altered(client, BROKER, "7", "message.max.bytes", "1") == ErrorCode.INVALID_REQUEST


USUAL = {
    "authorizer.class.name": "",
    "auto.create.topics.enable": "true",
    "auto.leader.rebalance.enable": "false",
    "background.threads": "1",
    "broker.id": "1",
    "delete.topic.enable": "true",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT",
    "log.cleaner.enable": "true",
    "log.cleaner.max.compaction.lag.ms": str(2**63 - 1),
    "log.cleaner.threads": "1",
    "log.flush.interval.messages": str(2**63 - 1),
    "log.retention.hours": "24",
    "log.retention.minutes": "1440",
    "log.retention.ms": "86400000",
    "log.roll.hours": "168",
    "message.max.bytes": "1048588",
    "node.id": "1",
    "num.io.threads": "1",
    "num.network.threads": "1",
    "num.partitions": "1",
    "num.recovery.threads.per.data.dir": "4",
    "process.roles": "broker,controller",
    "remote.log.storage.system.enable": "false",
    "sasl.enabled.mechanisms": "",
    "security.inter.broker.protocol": "PLAINTEXT",
    "unclean.leader.election.enable": "false",
}
"""What tools and consoles read of a broker that was started with log.retention.hours=24."""


def test_the_broker_lists_the_usual_names_with_what_is_in_force(tmp_path: Path) -> None:
    kind = ResourceType.BROKER
    with running(tmp_path, log_retention_hours=24) as broker, WireClient(broker.port) as client:
        tool = Tool(broker)
        listed = tool.described(kind, "1")
        assert {name: listed[name].value for name in USUAL} == USUAL
        assert listed["log.dir"].value == listed["log.dirs"].value == str(tmp_path)
        assert not {"zookeeper.connect", "inter.broker.protocol.version"} & listed.keys(), "Kafka 4 has neither"
        hours = listed["log.retention.hours"]
        assert (hours.source, hours.is_read_only) == (ConfigSource.STATIC_BROKER_CONFIG.value, True)
        assert hours.synonyms["log.retention.ms"].value == str(7 * 86_400_000), "of one name librdkafka keeps the last"
        for name in ("log.retention.hours", "broker.id", "num.io.threads"):
            assert tool.refused(kind, "1", name, "5") == ErrorCode.INVALID_REQUEST
        tool.set(kind, "1", "log.retention.ms", "5400000")
        found = described(client, BROKER, "1")
        assert (found["log.retention.hours"], found["log.retention.minutes"]) == (None, "90"), "not whole hours"


def test_the_sources_of_a_topics_config_are_told_in_the_order_in_which_they_count(tmp_path: Path) -> None:
    with running(tmp_path, message_max_bytes=2_000_000) as broker, WireClient(broker.port) as client:
        tool = Tool(broker)
        client.create("own", max_message_bytes="5000")
        tool.set(ResourceType.BROKER, "1", "message.max.bytes", "6000")
        assert altered(client, BROKER, "", "message.max.bytes", "7000") == 0
        asked = DescribeConfigsResource(
            resource_type=TOPIC, resource_name="own", configuration_keys=["max.message.bytes"]
        )
        [answer] = client.call(DescribeConfigsRequest(resources=[asked], include_synonyms=True), 4).results
        assert [(it.name, it.value, it.source) for it in answer.configs[0].synonyms] == [
            ("max.message.bytes", "5000", ConfigSource.DYNAMIC_TOPIC_CONFIG.value),
            ("message.max.bytes", "6000", ConfigSource.DYNAMIC_BROKER_CONFIG.value),
            ("message.max.bytes", "7000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG.value),
            ("message.max.bytes", "2000000", ConfigSource.STATIC_BROKER_CONFIG.value),
            ("message.max.bytes", "1048588", ConfigSource.DEFAULT_CONFIG.value),
        ]
        seen = tool.described(ResourceType.TOPIC, "own")["max.message.bytes"].synonyms
        assert {name: it.value for name, it in seen.items()} == {
            "max.message.bytes": "5000",
            "message.max.bytes": "1048588",
        }, "librdkafka asks for them; of one name it keeps the last"


def test_a_logger_is_turned_up_and_down(broker: BrokerProcess, client: WireClient) -> None:
    """Its level holds until the broker ends (KIP-412); events of lower levels are written at once, and no longer."""
    assert described(client, LOGGER, "1")["anabranch.listener"] == "INFO"
    assert altered(client, LOGGER, "1", "anabranch.listener", "DEBUG") == 0
    assert described(client, LOGGER, "1")["anabranch.listener"] == "DEBUG"
    with WireClient(broker.port) as hasty:
        hasty.send(hasty.produce_request("absent", 0, batch([b"x"]), acks=0), 9)
        broker.until_said("debug", "connection closed")
    assert altered(client, LOGGER, "1", "anabranch.listener", None) == 0
    assert described(client, LOGGER, "1")["anabranch.listener"] == "INFO"
    for name, value in (("anabranch.absent", "INFO"), ("anabranch.listener", "LOUD")):
        assert altered(client, LOGGER, "1", name, value) == ErrorCode.INVALID_CONFIG
    assert altered(client, LOGGER, "1", "anabranch", None) == ErrorCode.INVALID_REQUEST, "nothing is above it"
    assert altered(client, LOGGER, "7", "anabranch.listener", "DEBUG") == ErrorCode.INVALID_REQUEST


def test_a_topic_of_an_earlier_bound_keeps_its_value_and_its_other_configs_are_changed(tmp_path: Path) -> None:
    with running(tmp_path, log_roll_min_ms=1) as broker, WireClient(broker.port) as client:
        client.create("brief", segment_ms="5", max_message_bytes="2000000")
    limits = {"socket_request_max_bytes": 1_500_000}
    with running(tmp_path, **limits) as broker, WireClient(broker.port) as client:
        assert altered(client, TOPIC, "brief", "retention.ms", "100000") == ErrorCode.NONE
        assert altered(client, TOPIC, "brief", "segment.ms", "6") == ErrorCode.INVALID_CONFIG
        assert altered(client, TOPIC, "brief", "max.message.bytes", "2000001") == ErrorCode.INVALID_CONFIG
        found = described(client, TOPIC, "brief")
        wanted = {"segment.ms": "5", "retention.ms": "100000", "max.message.bytes": "2000000"}
        assert {name: found[name] for name in wanted} == wanted
        assert altered(client, TOPIC, "brief", "segment.ms", "1000") == ErrorCode.NONE
        assert altered(client, TOPIC, "brief", "segment.ms", "5") == ErrorCode.INVALID_CONFIG, "it is fresh again"
