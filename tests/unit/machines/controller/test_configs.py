"""Topic configs: what is taken, what is refused and with which words, where a value comes from."""

from __future__ import annotations

from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import REQUEST_SIZE_MAX
from anabranch.machines.controller.configs import (
    NOT_SET,
    TOPIC_CONFIGS,
    AlterConfigs,
    BrokerSettings,
    ConfigChange,
    ConfigOperation,
    ConfigSource,
    ConfigValue,
    ReplaceConfigs,
    Synonym,
    decide_alter_configs,
    decide_replace_configs,
    effective,
    refuse_configs,
    synonyms,
)
from anabranch.machines.controller.effects import Accepted, Refused, Validated
from anabranch.machines.controller.topics import CreateTopic, decide_create_topic
from tests.unit.machines.controller.transcript import Cluster

SET, DELETE, APPEND, SUBTRACT = ConfigOperation


def alter(cluster: Cluster, *changes: tuple[str, ConfigOperation, str | None], **more: bool) -> object:
    command = AlterConfigs("t", [ConfigChange(*change) for change in changes], **more)
    return cluster.submit(lambda state: decide_alter_configs(state, command))


@pytest.mark.parametrize("name", TOPIC_CONFIGS)
def test_every_default_is_valid_and_every_config_is_explained(name: str) -> None:
    config = TOPIC_CONFIGS[name]
    assert config.name == name
    assert config.validator(config.default) is None
    assert config.documentation.endswith(".")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("retention.ms", "soon", "a whole number from -1 to 9223372036854775807"),
        ("retention.ms", "-2", "a whole number from -1"),
        ("retention.bytes", "1.5", "a whole number"),
        ("retention.bytes", "٣", "a whole number"),
        ("segment.bytes", "13", "from 14 to 2147483647"),
        ("segment.bytes", "9" * 5000, "a whole number"),
        ("max.message.bytes", "2147483648", "to 2147483647"),
        ("enable.ordered.delivery", "yes", "true or false"),
        ("cleanup.policy", "shred", "one or more of delete, compact"),
        ("cleanup.policy", "", "one or more of"),
        ("cleanup.policy", "delete,delete", "one or more of"),
        ("compression.type", "brotli", "one of producer, uncompressed, gzip, snappy, lz4, zstd"),
        ("min.cleanable.dirty.ratio", "1.1", "a number from 0 to 1"),
        ("min.cleanable.dirty.ratio", "nan", "a number from 0 to 1"),
        ("min.cleanable.dirty.ratio", "half", "a number from 0 to 1"),
        ("min.cleanable.dirty.ratio", "0." + 60_000 * "0", "a number from 0 to 1 of at most 20 characters"),
        ("durability", "none", "one of inherit, fsync, os"),
        ("message.timestamp.type", "createtime", "one of CreateTime, LogAppendTime"),
        ("min.insync.replicas", "0", "from 1"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_it_must_be(name: str, value: str, wanted: str) -> None:
    refusal = refuse_configs({name: value})
    assert refusal is not None
    assert refusal.code is ErrorCode.INVALID_CONFIG
    assert f"The config {name!r} must be " in refusal.message
    assert wanted in refusal.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("cleanup.policy", "compact, delete"), ("enable.ordered.delivery", "FALSE"), ("retention.ms", "-1")],
)
def test_a_value_that_can_be_is_taken(name: str, value: str) -> None:
    assert refuse_configs({name: value}) is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("retention.msec", " Did you mean 'retention.ms'?"),
        ("retention_ms", " Did you mean 'retention.ms'?"),
        ("ordered.delivery", " Did you mean 'enable.ordered.delivery'?"),
        ("x", ""),
    ],
)
def test_an_unknown_config_is_refused_with_the_nearest_known_one(name: str, hint: str) -> None:
    refusal = refuse_configs({name: "1"})
    assert refusal == Refused(ErrorCode.INVALID_CONFIG, f"There is no topic config {name!r}.{hint}")


@pytest.mark.parametrize(("static", "largest"), [({}, REQUEST_SIZE_MAX), ({"socket.request.max.bytes": "5000"}, 5000)])
def test_a_batch_that_no_request_could_bring_is_refused(static: dict[str, str], largest: int) -> None:
    cluster, settings = Cluster(), BrokerSettings(static=static)
    cluster.create(1)
    larger = str(largest + 1)
    alteration = AlterConfigs("t", [ConfigChange("max.message.bytes", SET, larger)])
    replacement = ReplaceConfigs("t", {"max.message.bytes": larger})
    creation = CreateTopic("u", UUID(int=5), configs={"max.message.bytes": larger})
    for refusal in (
        cluster.submit(lambda state: decide_alter_configs(state, alteration, settings)),
        cluster.submit(lambda state: decide_replace_configs(state, replacement, settings)),
        cluster.submit(lambda state: decide_create_topic(state, creation, 1, settings)),
    ):
        assert isinstance(refusal, Refused)
        assert refusal.code is ErrorCode.INVALID_CONFIG
        assert f"must not be above the broker's socket.request.max.bytes ({largest})" in refusal.message
    assert refuse_configs({"max.message.bytes": str(largest)}, settings) is None


def test_lags_that_contradict_each_other_are_refused() -> None:
    refusal = refuse_configs({"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "5"})
    assert refusal is not None
    assert "must not be above 'max.compaction.lag.ms' (5)" in refusal.message


def test_set_and_delete_change_one_override_each_and_keep_the_others() -> None:
    cluster = Cluster()
    cluster.create(1, configs={"retention.ms": "1", "segment.bytes": "2000000"})
    cluster.run()
    cluster.text()
    assert isinstance(alter(cluster, ("retention.ms", SET, "2"), ("segment.bytes", DELETE, None)), Accepted)
    assert cluster.text() == ('write /config/topics/t {"version":1,"config":{"retention.ms":"2"}}\n  ApplyConfigs')


def test_append_and_subtract_change_lists_and_start_from_what_rules() -> None:
    cluster = Cluster(partitions=1)
    alter(cluster, ("cleanup.policy", APPEND, "compact"))
    assert cluster.state.configs["t"] == {"cleanup.policy": "delete,compact"}
    alter(cluster, ("cleanup.policy", APPEND, "compact"))
    assert cluster.state.configs["t"] == {"cleanup.policy": "delete,compact"}
    alter(cluster, ("cleanup.policy", SUBTRACT, "delete"))
    assert cluster.state.configs["t"] == {"cleanup.policy": "compact"}
    assert isinstance(alter(cluster, ("cleanup.policy", SUBTRACT, "compact")), Refused)


def test_a_broker_setting_is_where_append_starts_from() -> None:
    cluster = Cluster(partitions=1)
    command = AlterConfigs("t", [ConfigChange("cleanup.policy", APPEND, "delete")])
    settings = BrokerSettings(static={"log.cleanup.policy": "compact"})
    cluster.submit(lambda state: decide_alter_configs(state, command, settings))
    assert cluster.state.configs["t"] == {"cleanup.policy": "compact,delete"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([("retention.ms", SET, None)], ErrorCode.INVALID_REQUEST),
        ([("retention.ms", SET, "1"), ("retention.ms", DELETE, None)], ErrorCode.INVALID_REQUEST),
        ([("retention.ms", APPEND, "1")], ErrorCode.INVALID_CONFIG),
        ([("retention.mss", DELETE, None)], ErrorCode.INVALID_CONFIG),
        ([("retention.ms", SET, "x")], ErrorCode.INVALID_CONFIG),
    ],
)
def test_changes_that_cannot_be_are_refused(
    changes: list[tuple[str, ConfigOperation, str | None]], code: ErrorCode
) -> None:
    cluster = Cluster(partitions=1)
    reply = alter(cluster, *changes)
    assert isinstance(reply, Refused)
    assert reply.code is code
    assert cluster.text() == ""


LISTED = "  compact" + 60_000 * " " + ",,"


def test_a_list_is_stored_in_its_plain_form() -> None:
    for change in ("create", "set", "append", "replace"):
        cluster = Cluster(partitions=1)
        if change == "create":
            command = CreateTopic("u", UUID(int=77), 1, configs={"cleanup.policy": LISTED, "retention.ms": None})
            assert isinstance(cluster.submit(lambda state, it=command: decide_create_topic(state, it)), Accepted)
            assert cluster.state.configs["u"] == {"cleanup.policy": "compact"}
            continue
        if change == "replace":
            given = ReplaceConfigs("t", {"cleanup.policy": LISTED, "retention.ms": None})
            assert isinstance(cluster.submit(lambda state, it=given: decide_replace_configs(state, it)), Accepted)
        else:
            operation = SET if change == "set" else APPEND
            assert isinstance(alter(cluster, ("cleanup.policy", operation, LISTED)), Accepted)
        wanted = "delete,compact" if change == "append" else "compact"
        assert cluster.state.configs["t"] == {"cleanup.policy": wanted}


def test_replacing_drops_what_is_not_named() -> None:
    cluster = Cluster()
    cluster.create(1, configs={"retention.ms": "1", "segment.bytes": "2000000"})
    command = ReplaceConfigs("t", {"segment.bytes": "3000000", "retention.ms": None})
    assert isinstance(cluster.submit(lambda state: decide_replace_configs(state, command)), Accepted)
    assert cluster.state.configs["t"] == {"segment.bytes": "3000000"}


def test_validating_and_unknown_topics() -> None:
    cluster = Cluster(partitions=1)
    assert alter(cluster, ("retention.ms", SET, "1"), validate_only=True) == Validated()
    assert cluster.text() == ""
    cluster.delete()
    reply = alter(cluster, ("retention.ms", SET, "1"))
    assert isinstance(reply, Refused)
    assert reply.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_shorter_retention_has_retiring_partitions_looked_at() -> None:
    cluster = Cluster(partitions=1)
    for count in (2, 1):
        cluster.resize(count)
        cluster.run()
    cluster.text()
    alter(cluster, ("retention.ms", SET, "1"))
    assert cluster.text().endswith("  ApplyConfigs\n  InspectRetiring")


def test_an_override_goes_before_a_broker_setting_before_the_default() -> None:
    config = TOPIC_CONFIGS["retention.ms"]
    settings = BrokerSettings(static={"log.retention.ms": "7"})
    assert effective(config, {}, NOT_SET) == ConfigValue("604800000", ConfigSource.DEFAULT_CONFIG)
    assert effective(config, {}, settings) == ConfigValue("7", ConfigSource.STATIC_BROKER_CONFIG)
    assert effective(config, {"retention.ms": "1"}, settings) == ConfigValue("1", ConfigSource.TOPIC_CONFIG)
    assert synonyms(config, {"retention.ms": "1"}, settings) == (
        Synonym("retention.ms", "1", ConfigSource.TOPIC_CONFIG),
        Synonym("log.retention.ms", "7", ConfigSource.STATIC_BROKER_CONFIG),
        Synonym("log.retention.ms", "604800000", ConfigSource.DEFAULT_CONFIG),
    )
    changed = BrokerSettings({"log.retention.ms": "9"}, {"log.retention.ms": "8"}, settings.static)
    assert [(it.value, it.source) for it in synonyms(config, {}, changed)] == [
        ("9", ConfigSource.DYNAMIC_BROKER_CONFIG),
        ("8", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
        ("7", ConfigSource.STATIC_BROKER_CONFIG),
        ("604800000", ConfigSource.DEFAULT_CONFIG),
    ]


def test_small_segments_are_refused_with_the_setting_that_says_so() -> None:
    small = refuse_configs({"segment.bytes": "1048575"})
    assert small is not None
    assert small.code is ErrorCode.INVALID_CONFIG
    assert "log.segment.min.bytes (1048576)" in small.message
    assert refuse_configs({"segment.bytes": "1048576"}) is None
    lower = BrokerSettings(static={"log.segment.min.bytes": "100"})
    assert refuse_configs({"segment.bytes": "100"}, lower) is None
    assert refuse_configs({"segment.bytes": "99"}, lower) is not None


def test_segments_that_would_be_files_of_a_moment_are_refused_with_the_setting_that_says_so() -> None:
    short = refuse_configs({"segment.ms": "999"})
    assert short is not None
    assert short.code is ErrorCode.INVALID_CONFIG
    assert "log.roll.min.ms (1000)" in short.message
    assert refuse_configs({"segment.ms": "1000"}) is None
    lower = BrokerSettings(static={"log.roll.min.ms": "7"})
    assert refuse_configs({"segment.ms": "7"}, lower) is None
    assert refuse_configs({"segment.ms": "6"}, lower) is not None
