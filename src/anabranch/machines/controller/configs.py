"""Topic configs: their table, the values each accepts, and the commands that change overrides.

A config's value is the topic's override, or the broker's setting of the config's `broker_setting`, or the default.
Kafka's names, types and defaults; `enable.ordered.delivery` is KIP-253's, `accept.range.fetch` the cooperative
consumption proposal's, `durability` ours. An unknown name is refused, with the nearest known one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import INTERNAL_TOPICS
from anabranch.base.limits import (
    MESSAGE_SIZE_MAX,
    REQUEST_SIZE_MAX,
    SEGMENT_AGE_MIN_MS,
    SEGMENT_SIZE_MIN,
    SMALL_SEGMENT_AGE_MS,
)
from anabranch.machines.controller import nodes
from anabranch.machines.controller.config_values import (
    Validator,
    boolean,
    one_of,
    plain,
    ratio,
    several_of,
    split,
    whole,
)
from anabranch.machines.controller.effects import (
    Accepted,
    ApplyConfigs,
    CommandReply,
    Decision,
    InspectRetiring,
    Refused,
    Validated,
    decision,
)
from anabranch.machines.controller.nodes import MetadataRecord
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.outcome import Draft

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
DAY_MS = 24 * 60 * 60 * 1000


class ConfigType(IntEnum):
    """`config_type` of a DescribeConfigs answer (KIP-569)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ConfigSource(IntEnum):
    """`config_source` of a DescribeConfigs answer (KIP-226)."""

    TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    DYNAMIC_BROKER_LOGGER_CONFIG = 6
    GROUP_CONFIG = 8


class ConfigOperation(IntEnum):
    """`config_operation` of an IncrementalAlterConfigs request (KIP-339)."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """One topic config, with everything that DescribeConfigs reports."""

    name: str
    type: ConfigType
    default: str
    validator: Validator
    documentation: str
    broker_setting: str | None = None
    """The broker setting that it overrides."""


class ConfigValue(NamedTuple):
    """The value of a config for a topic, and its source."""

    value: str
    source: ConfigSource


class Synonym(NamedTuple):
    """A place that gives a config a value; of several the first one counts."""

    name: str
    value: str
    source: ConfigSource


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What a broker was told of its settings, apart from their defaults; the first of the three counts."""

    own: Mapping[str, str] = field(default_factory=dict)
    """Dynamic settings of this broker."""
    default: Mapping[str, str] = field(default_factory=dict)
    """Dynamic settings of every broker."""
    static: Mapping[str, str] = field(default_factory=dict)
    """What it was started with."""

    def sources(self, name: str) -> list[Synonym]:
        """Every place that gives a setting a value, the one that counts first."""
        layers = (
            (self.own, ConfigSource.DYNAMIC_BROKER_CONFIG),
            (self.default, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
            (self.static, ConfigSource.STATIC_BROKER_CONFIG),
        )
        return [Synonym(name, values[name], source) for values, source in layers if name in values]


NOT_SET = BrokerSettings()


_B, _S, _I, _L, _D, _M = (
    ConfigType.BOOLEAN,
    ConfigType.STRING,
    ConfigType.INT,
    ConfigType.LONG,
    ConfigType.DOUBLE,
    ConfigType.LIST,
)
NO_FLUSH_OF_ITS_OWN = "Accepted; a log is flushed before a produce is answered, or by the system, as durability says."
_TABLE = (
    TopicConfig(
        "accept.range.fetch", _B, "false", boolean, "Whether a fetch may ask for the records of a range of keys only."
    ),
    TopicConfig(
        "cleanup.policy",
        _M,
        "delete",
        several_of("delete", "compact"),
        "What becomes of old records: deleted by time and size, compacted to the last one of each key, or both.",
        "log.cleanup.policy",
    ),
    TopicConfig(
        "compression.type",
        _S,
        "producer",
        one_of("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
        "How batches are stored: as the producer compressed them, or always in one way.",
        "compression.type",
    ),
    TopicConfig(
        "delete.retention.ms",
        _L,
        str(DAY_MS),
        whole(0, LONG_MAX),
        "How long tombstones are kept in a compacted topic.",
        "log.cleaner.delete.retention.ms",
    ),
    TopicConfig(
        "durability",
        _S,
        "inherit",
        one_of("inherit", "fsync", "os"),
        "When a produce is answered: after it is on the disk (fsync), after it was written (os), or as the "
        "broker's setting says (inherit).",
        "durability",
    ),
    TopicConfig(
        "enable.ordered.delivery",
        _B,
        "true",
        boolean,
        "Whether records of one key are delivered in order across changes of the partition count.",
    ),
    TopicConfig(
        "file.delete.delay.ms",
        _L,
        "60000",
        whole(0, LONG_MAX),
        "Accepted; the files of deleted segments are removed soon, whatever it says.",
        "log.segment.delete.delay.ms",
    ),
    TopicConfig(
        "flush.messages",
        _L,
        str(LONG_MAX),
        whole(1, LONG_MAX),
        NO_FLUSH_OF_ITS_OWN,
        "log.flush.interval.messages",
    ),
    TopicConfig(
        "flush.ms",
        _L,
        str(LONG_MAX),
        whole(0, LONG_MAX),
        NO_FLUSH_OF_ITS_OWN,
        "log.flush.interval.ms",
    ),
    TopicConfig(
        "index.interval.bytes",
        _I,
        "4096",
        whole(0, INT_MAX),
        "Bytes of a log between two entries of its offset index.",
        "log.index.interval.bytes",
    ),
    TopicConfig(
        "max.compaction.lag.ms",
        _L,
        str(LONG_MAX),
        whole(1, LONG_MAX),
        "How long a record of a compacted topic waits for compaction at most, however little of its log is dirty.",
        "log.cleaner.max.compaction.lag.ms",
    ),
    TopicConfig(
        "max.message.bytes",
        _I,
        str(MESSAGE_SIZE_MAX),
        whole(0, INT_MAX),
        "The largest record batch that is accepted, after compression.",
        "message.max.bytes",
    ),
    TopicConfig(
        "message.timestamp.after.max.ms",
        _L,
        "3600000",
        whole(0, LONG_MAX),
        "How far a record's timestamp may lie after the broker's clock, when timestamps are CreateTime.",
        "log.message.timestamp.after.max.ms",
    ),
    TopicConfig(
        "message.timestamp.before.max.ms",
        _L,
        str(LONG_MAX),
        whole(0, LONG_MAX),
        "How far a record's timestamp may lie before the broker's clock, when timestamps are CreateTime.",
        "log.message.timestamp.before.max.ms",
    ),
    TopicConfig(
        "message.timestamp.difference.max.ms",
        _L,
        str(LONG_MAX),
        whole(0, LONG_MAX),
        "How far a record's timestamp may lie from the broker's clock, before or after (older name of the two above).",
        "log.message.timestamp.difference.max.ms",
    ),
    TopicConfig(
        "message.timestamp.type",
        _S,
        "CreateTime",
        one_of("CreateTime", "LogAppendTime"),
        "Whether a record's timestamp is the producer's, or the time of its append.",
        "log.message.timestamp.type",
    ),
    TopicConfig(
        "min.cleanable.dirty.ratio",
        _D,
        "0.5",
        ratio,
        "Which part of a log must be uncompacted before it is compacted again.",
        "log.cleaner.min.cleanable.ratio",
    ),
    TopicConfig(
        "min.compaction.lag.ms",
        _L,
        "0",
        whole(0, LONG_MAX),
        "How long a record stays uncompacted at least.",
        "log.cleaner.min.compaction.lag.ms",
    ),
    TopicConfig(
        "min.insync.replicas",
        _I,
        "1",
        whole(1, INT_MAX),
        "Accepted; with one replica per partition it changes nothing.",
        "min.insync.replicas",
    ),
    TopicConfig(
        "preallocate",
        _B,
        "false",
        boolean,
        "Accepted; a segment's file grows as it is written.",
        "log.preallocate",
    ),
    TopicConfig(
        "reserve.message.value.range.fetch",
        _B,
        "false",
        boolean,
        "Whether whole records are kept in memory for readers of other key ranges that do not fetch at that time.",
    ),
    TopicConfig(
        "retention.bytes",
        _L,
        "-1",
        whole(-1, LONG_MAX),
        "How large a partition's log may become before its oldest segments are deleted; -1: no limit.",
        "log.retention.bytes",
    ),
    TopicConfig(
        "retention.ms",
        _L,
        str(7 * DAY_MS),
        whole(-1, LONG_MAX),
        "How old a segment's newest record may become before the segment is deleted; -1: no limit.",
        "log.retention.ms",
    ),
    TopicConfig(
        "segment.bytes",
        _I,
        str(1 << 30),
        whole(14, INT_MAX),
        "How large a segment of a log becomes before the next one is begun.",
        "log.segment.bytes",
    ),
    TopicConfig(
        "segment.index.bytes",
        _I,
        str(10 << 20),
        whole(4, INT_MAX),
        "Accepted; an index is as large as its segment needs.",
        "log.index.size.max.bytes",
    ),
    TopicConfig(
        "segment.jitter.ms",
        _L,
        "0",
        whole(0, LONG_MAX),
        "Accepted; segments that begin by time begin at segment.ms.",
        "log.roll.jitter.ms",
    ),
    TopicConfig(
        "segment.ms",
        _L,
        str(7 * DAY_MS),
        whole(1, LONG_MAX),
        "After which time the next segment is begun, even if the last one is not full.",
        "log.roll.ms",
    ),
    TopicConfig(
        "unclean.leader.election.enable",
        _B,
        "false",
        boolean,
        "Accepted; a partition has one replica.",
        "unclean.leader.election.enable",
    ),
)
TOPIC_CONFIGS: Mapping[str, TopicConfig] = {config.name: config for config in _TABLE}
"""Every topic config, by name."""
INTERNAL_VALUES: Mapping[str, tuple[str, ...]] = {"cleanup.policy": ("compact",), "durability": ("inherit", "fsync")}
"""The values of configs of a coordinator's topic, where others would break its promises: what it has answered for is
as safe as the broker's setting says, and holds until a newer record says otherwise."""


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One entry of an IncrementalAlterConfigs request."""

    name: str
    operation: ConfigOperation
    value: str | None = None


@dataclass(frozen=True, slots=True)
class AlterConfigs:
    """One topic of an IncrementalAlterConfigs request."""

    topic: str
    changes: Sequence[ConfigChange]
    validate_only: bool = False


@dataclass(frozen=True, slots=True)
class ReplaceConfigs:
    """One topic of an AlterConfigs request: a config that it does not name returns to its default."""

    topic: str
    configs: Mapping[str, str | None]
    validate_only: bool = False


def decide_alter_configs(
    state: ControllerState, command: AlterConfigs, broker_settings: BrokerSettings = NOT_SET
) -> Decision[CommandReply]:
    """Change overrides of a topic. APPEND and SUBTRACT start from `broker_settings` where no override exists."""
    overrides = dict(state.configs.get(command.topic, {}))
    seen: set[str] = set()
    for change in command.changes:
        config = TOPIC_CONFIGS.get(change.name)
        if config is None:
            return Decision(reply=_unknown_config(change.name))
        if change.name in seen:
            return _invalid_request(f"The config {change.name!r} is given more than once.")
        seen.add(change.name)
        if change.operation is ConfigOperation.DELETE:
            overrides.pop(change.name, None)
            continue
        if change.value is None:
            return _invalid_request(f"The config {change.name!r} needs a value for {change.operation.name}.")
        if change.operation is ConfigOperation.SET:
            overrides[change.name] = change.value
            continue
        if config.type is not ConfigType.LIST:
            return Decision(
                reply=Refused(
                    ErrorCode.INVALID_CONFIG,
                    f"{change.operation.name} is for configs that are lists, which {change.name!r} is not. Use SET.",
                )
            )
        items = split(effective(config, overrides, broker_settings).value)
        given = split(change.value)
        if change.operation is ConfigOperation.APPEND:
            items += [item for item in given if item not in items]
        else:
            items = [item for item in items if item not in given]
        overrides[change.name] = ",".join(items)
    return _decide_overrides(state, command.topic, overrides, broker_settings, validate_only=command.validate_only)


def decide_replace_configs(
    state: ControllerState, command: ReplaceConfigs, broker_settings: BrokerSettings = NOT_SET
) -> Decision[CommandReply]:
    """Replace all overrides of a topic."""
    return _decide_overrides(
        state, command.topic, command.configs, broker_settings, validate_only=command.validate_only
    )


def message_size_max(broker_settings: BrokerSettings) -> int:
    """The largest value of `max.message.bytes`: no request can bring a larger batch."""
    return int(broker_settings.static.get("socket.request.max.bytes", REQUEST_SIZE_MAX))


def small_segment(broker_settings: BrokerSettings) -> tuple[int, int]:
    """The bytes that a segment finished by time alone has, and its age for each segment of the log if it has fewer."""
    settings = broker_settings.static
    return (
        int(settings.get("log.segment.min.bytes", SEGMENT_SIZE_MIN)),
        int(settings.get("log.roll.small.ms", SMALL_SEGMENT_AGE_MS)),
    )


_SEGMENTS_MIN = (
    ("segment.bytes", "log.segment.min.bytes", SEGMENT_SIZE_MIN),
    ("segment.ms", "log.roll.min.ms", SEGMENT_AGE_MIN_MS),
)
"""Configs, the settings that are their least values, and the defaults of these.

With smaller ones a client could have a file made for each of its batches, or in each millisecond.
"""


def overrides_of(given: Mapping[str, str | None]) -> dict[str, str]:
    """The overrides that a client gives, as they are stored: without those that are null, lists in their plain form."""
    return {
        name: plain(value) if name in TOPIC_CONFIGS and TOPIC_CONFIGS[name].type is ConfigType.LIST else value
        for name, value in given.items()
        if value is not None
    }


def refuse_configs(
    overrides: Mapping[str, str],
    broker_settings: BrokerSettings = NOT_SET,
    stored: Mapping[str, str] = MappingProxyType({}),
) -> Refused | None:
    """Return the refusal of invalid overrides on a broker with these settings; None for valid ones.

    A value that is `stored` already was valid when it was given, and stays: the bounds of today are for fresh values.
    """
    fresh = {name: value for name, value in overrides.items() if stored.get(name) != value}
    for name, value in fresh.items():
        config = TOPIC_CONFIGS.get(name)
        if config is None:
            return _unknown_config(name)
        wanted = config.validator(value)
        if wanted is not None:
            return Refused(ErrorCode.INVALID_CONFIG, f"The config {name!r} must be {wanted}, not {value!r}.")
    largest = message_size_max(broker_settings)
    if int(fresh.get("max.message.bytes", 0)) > largest:
        return Refused(
            ErrorCode.INVALID_CONFIG,
            f"The config 'max.message.bytes' ({overrides['max.message.bytes']}) must not be above the broker's "
            f"socket.request.max.bytes ({largest}): no request could bring such a batch.",
        )
    for name, setting, default in _SEGMENTS_MIN:
        smallest = int(broker_settings.static.get(setting, default))
        if int(fresh.get(name, smallest)) < smallest:
            return Refused(
                ErrorCode.INVALID_CONFIG,
                f"The config {name!r} ({overrides[name]}) must not be below the broker's {setting} ({smallest}): every "
                "segment is a file.",
            )
    least, most = (
        int(overrides.get(name, TOPIC_CONFIGS[name].default))
        for name in ("min.compaction.lag.ms", "max.compaction.lag.ms")
    )
    if least > most:
        return Refused(
            ErrorCode.INVALID_CONFIG,
            f"The config 'min.compaction.lag.ms' ({least}) must not be above 'max.compaction.lag.ms' ({most}).",
        )
    return None


def effective(config: TopicConfig, overrides: Mapping[str, str], broker_settings: BrokerSettings) -> ConfigValue:
    """The value of a config for a topic with these overrides, on a broker with these settings."""
    first = synonyms(config, overrides, broker_settings)[0]
    return ConfigValue(first.value, first.source)


def synonyms(config: TopicConfig, overrides: Mapping[str, str], broker_settings: BrokerSettings) -> tuple[Synonym, ...]:
    """Every place that gives a config a value, the one that counts first."""
    found: list[Synonym] = []
    if config.name in overrides:
        found.append(Synonym(config.name, overrides[config.name], ConfigSource.TOPIC_CONFIG))
    if config.broker_setting is not None:
        found += broker_settings.sources(config.broker_setting)
    found.append(Synonym(config.broker_setting or config.name, config.default, ConfigSource.DEFAULT_CONFIG))
    return tuple(found)


def _decide_overrides(
    state: ControllerState,
    topic: str,
    given: Mapping[str, str | None],
    broker_settings: BrokerSettings,
    *,
    validate_only: bool,
) -> Decision[CommandReply]:
    known = state.topics.get(topic)
    if known is None or topic in state.deleting:
        return Decision(reply=Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no topic {topic!r}."))
    overrides = overrides_of(given)
    refusal = refuse_configs(overrides, broker_settings, overrides_of(state.configs.get(topic, {})))
    if refusal is None and topic in INTERNAL_TOPICS:
        overrides.setdefault("cleanup.policy", "compact")
        refusal = _refuse_internal(topic, overrides)
    if refusal is not None:
        return Decision(reply=refusal)
    if validate_only:
        return Decision(reply=Validated())
    draft: Draft[MetadataRecord] = Draft()
    draft.write(nodes.put_configs(topic, overrides))
    draft.perform(ApplyConfigs(topic))
    if len(known.partitions) > known.undeleted_partition_count:
        draft.perform(InspectRetiring((topic,)))
    return decision(draft, Accepted(topic, known.topic_id))


def _refuse_internal(topic: str, overrides: Mapping[str, str]) -> Refused | None:
    """Refuse what would lose records of a coordinator that were answered for, or delete them by age."""
    for name, allowed in INTERNAL_VALUES.items():
        value = overrides.get(name, TOPIC_CONFIGS[name].default)
        if not {*split(value)} <= {*allowed}:
            message = f"The config {name!r} of {topic!r} must be {' or '.join(allowed)}, not {value!r}."
            return Refused(ErrorCode.INVALID_CONFIG, message)
    return None


def _invalid_request(message: str) -> Decision[CommandReply]:
    return Decision(reply=Refused(ErrorCode.INVALID_REQUEST, message))


def _unknown_config(name: str) -> Refused:
    near = get_close_matches(name, TOPIC_CONFIGS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return Refused(ErrorCode.INVALID_CONFIG, f"There is no topic config {name!r}.{hint}")
