"""What a topic's configs mean to its partitions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from anabranch.base.limits import REQUEST_SIZE_MAX
from anabranch.machines.controller.configs import BrokerSettings
from anabranch.records.compression import Compression
from anabranch.server.partitions.topic_settings import TopicSettings, topic_settings
from anabranch.storage.log.config import Durability


def settings(
    overrides: Mapping[str, str] | None = None, broker: Mapping[str, str] | None = None, durability: str = "os"
) -> TopicSettings:
    return topic_settings(overrides or {}, BrokerSettings(static=broker or {}), durability)


def test_defaults_are_kafkas() -> None:
    made = settings()
    assert (made.message_size_max, made.compression, made.log_append_time) == (1_048_588, None, False)
    assert (made.log.retention_ms, made.log.retention_bytes) == (7 * 24 * 3_600_000, -1)
    assert (made.log.delete, made.log.compact) == (True, False)
    assert made.min_insync_replicas == 1


def test_a_topics_config_counts_before_the_brokers_and_that_before_the_default() -> None:
    assert settings(broker={"log.retention.ms": "5"}).log.retention_ms == 5
    assert settings({"retention.ms": "7"}, {"log.retention.ms": "5"}).log.retention_ms == 7


def test_no_batch_may_be_larger_than_a_request() -> None:
    assert settings({"max.message.bytes": str(2**31 - 1)}).message_size_max == REQUEST_SIZE_MAX
    assert settings({"max.message.bytes": "5000"}, {"socket.request.max.bytes": "4000"}).message_size_max == 4000


@pytest.mark.parametrize(
    ("said", "inherited", "expected"),
    [
        (None, "os", Durability.OS),
        (None, "fsync", Durability.FSYNC),
        ("inherit", "fsync", Durability.FSYNC),
        ("os", "fsync", Durability.OS),
        ("fsync", "os", Durability.FSYNC),
    ],
)
def test_durability_is_inherited_unless_the_topic_says_its_own(
    said: str | None, inherited: str, expected: Durability
) -> None:
    made = settings({} if said is None else {"durability": said}, durability=inherited)
    assert made.log.durability is expected
    assert made.fsync is (expected is Durability.FSYNC)


@pytest.mark.parametrize(
    ("policy", "delete", "compact"),
    [
        ("delete", True, False),
        ("compact", False, True),
        ("compact,delete", True, True),
        ("compact, delete", True, True),
    ],
)
def test_cleanup_policies_are_a_list(policy: str, delete: bool, compact: bool) -> None:
    log = settings({"cleanup.policy": policy}).log
    assert (log.delete, log.compact) == (delete, compact)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("producer", None),
        ("uncompressed", Compression.NONE),
        ("gzip", Compression.GZIP),
        ("snappy", Compression.SNAPPY),
        ("lz4", Compression.LZ4),
        ("zstd", Compression.ZSTD),
    ],
)
def test_every_compression_type_has_its_codec(name: str, codec: Compression | None) -> None:
    assert settings({"compression.type": name}).compression is codec


def test_the_narrower_of_the_two_timestamp_limits_holds() -> None:
    made = settings(
        {"message.timestamp.before.max.ms": "10", "message.timestamp.after.max.ms": "30"},
    )
    assert (made.timestamp_before_max_ms, made.timestamp_after_max_ms) == (10, 30)
    made = settings({"message.timestamp.before.max.ms": "10", "message.timestamp.difference.max.ms": "20"})
    assert made.timestamp_before_max_ms == 10
    assert made.timestamp_after_max_ms == 20


def test_append_time_is_the_topics_choice() -> None:
    assert settings({"message.timestamp.type": "LogAppendTime"}).log_append_time
