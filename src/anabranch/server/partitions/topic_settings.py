"""A topic's configs as its partitions use them: parsed once, when the topic is loaded or its configs change.

Topics whose configs are the same have them parsed once together, and share one object: of 100,000 topics few differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.machines.controller.config_values import split
from anabranch.machines.controller.configs import (
    NOT_SET,
    TOPIC_CONFIGS,
    BrokerSettings,
    effective,
    message_size_max,
    small_segment,
)
from anabranch.records.compression import Compression
from anabranch.storage.log.config import Durability, LogConfig

REMEMBERED_MAX = 1_000
"""Different configs of topics whose settings are remembered."""
_COMPRESSIONS = {
    "producer": None,
    "uncompressed": Compression.NONE,
    "gzip": Compression.GZIP,
    "snappy": Compression.SNAPPY,
    "lz4": Compression.LZ4,
    "zstd": Compression.ZSTD,
}


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """The configs of one topic, as values."""

    log: LogConfig
    message_size_max: int
    compression: Compression | None
    """None: keep the producer's compression."""
    log_append_time: bool
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    accepts_range_fetch: bool = False
    keeps_others_records: bool = False
    """Whether records that a pass finds for readers without a fetch at that time are kept for their next one."""

    @property
    def keyed(self) -> bool:
        """Whether every record must have a key: compaction keeps the last one of each."""
        return self.log.compact

    @property
    def fsync(self) -> bool:
        """Whether an acknowledgement waits for the disk."""
        return self.log.durability is Durability.FSYNC


def topic_settings(overrides: Mapping[str, str], broker_settings: BrokerSettings, durability: str) -> TopicSettings:
    """Parse a topic's configs; `broker_settings`: those that were set; `durability` is the topic's default."""
    value = {name: effective(config, overrides, broker_settings).value for name, config in TOPIC_CONFIGS.items()}
    said = value["durability"]
    policies = split(value["cleanup.policy"])
    small_segment_bytes, small_segment_ms = small_segment(broker_settings)
    difference = int(value["message.timestamp.difference.max.ms"])
    return TopicSettings(
        log=LogConfig(
            durability=Durability(durability if said == "inherit" else said),
            segment_bytes=int(value["segment.bytes"]),
            segment_ms=int(value["segment.ms"]),
            small_segment_bytes=small_segment_bytes,
            small_segment_ms=small_segment_ms,
            index_interval_bytes=int(value["index.interval.bytes"]),
            retention_ms=int(value["retention.ms"]),
            retention_bytes=int(value["retention.bytes"]),
            delete="delete" in policies,
            compact="compact" in policies,
            delete_retention_ms=int(value["delete.retention.ms"]),
            min_cleanable_dirty_ratio=float(value["min.cleanable.dirty.ratio"]),
            min_compaction_lag_ms=int(value["min.compaction.lag.ms"]),
            max_compaction_lag_ms=int(value["max.compaction.lag.ms"]),
        ),
        message_size_max=min(int(value["max.message.bytes"]), message_size_max(broker_settings)),
        compression=_COMPRESSIONS[value["compression.type"]],
        log_append_time=value["message.timestamp.type"] == "LogAppendTime",
        timestamp_before_max_ms=min(int(value["message.timestamp.before.max.ms"]), difference),
        timestamp_after_max_ms=min(int(value["message.timestamp.after.max.ms"]), difference),
        accepts_range_fetch=value["accept.range.fetch"] == "true",
        keeps_others_records=value["reserve.message.value.range.fetch"] == "true",
    )


class SharedSettings:
    """The settings of all topics of a broker. Any thread may ask."""

    def __init__(self, durability: str) -> None:
        """`durability`: the topics' default."""
        self._durability = durability
        self._known: tuple[BrokerSettings, dict[frozenset[tuple[str, str]], TopicSettings]] = NOT_SET, {}
        """What the broker was told of its settings, and by topics' overrides what follows."""

    def of(self, overrides: Mapping[str, str], broker_settings: BrokerSettings) -> TopicSettings:
        """As `topic_settings`; the same object for the same configs."""
        told, known = self._known
        if told is not broker_settings:
            known = {}
            self._known = broker_settings, known
        key = frozenset(overrides.items())
        found = known.get(key)
        if found is None:
            if len(known) >= REMEMBERED_MAX:
                known.clear()
            found = known[key] = topic_settings(overrides, broker_settings, self._durability)
        return found
