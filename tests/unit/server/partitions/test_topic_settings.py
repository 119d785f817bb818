"""What a topic's configs mean to its partitions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from anabranch.base.limits import REQUEST_SIZE_MAX
from anabranch.machines.controller.configs import NOT_SET, BrokerSettings
from anabranch.records.compression import Compression
from anabranch.server.partitions.topic_settings import REMEMBERED_MAX, SharedSettings, TopicSettings, topic_settings
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


def test_topics_with_the_same_configs_share_their_settings_until_the_brokers_change() -> None:
    shared, told = SharedSettings("os"), BrokerSettings(static={"log.retention.ms": "5"})
    first = shared.of({"segment.bytes": "1000", "retention.bytes": "7"}, told)
    assert first == settings({"segment.bytes": "1000", "retention.bytes": "7"}, {"log.retention.ms": "5"})
    assert shared.of({"retention.bytes": "7", "segment.bytes": "1000"}, told) is first
    assert shared.of({"retention.bytes": "8", "segment.bytes": "1000"}, told).log.retention_bytes == 8
    again = BrokerSettings(static={"log.retention.ms": "6"})
    assert shared.of({}, again).log.retention_ms == 6
    assert shared.of({}, told).log.retention_ms == 5, "asked in a thread meanwhile"
    assert shared.of({}, again).log.retention_ms == 6


def test_the_settings_that_are_remembered_are_bounded() -> None:
    shared = SharedSettings("os")
    first = shared.of({}, NOT_SET)
    for number in range(1, REMEMBERED_MAX):
        assert shared.of({"retention.ms": str(number)}, NOT_SET).log.retention_ms == number
    assert shared.of({}, NOT_SET) is first
    shared.of({"retention.ms": "-1"}, NOT_SET)
    assert shared.of({}, NOT_SET) is not first
