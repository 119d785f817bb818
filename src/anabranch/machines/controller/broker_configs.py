"""Settings of brokers that change while they run (KIP-226): which they are, and the command that changes them.

A setting is dynamic where it is the default of a topic's config, which a log takes on at once, and where background
work reads it each time; clients also set one that has no effect here. Everything else is read at the start. A broker's
own value counts before the default of all brokers, this before what the broker was started with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import is_whole
from anabranch.base.limits import RECOVERY_THREADS
from anabranch.machines.controller import nodes
from anabranch.machines.controller.config_values import one_of, plain, split, whole
from anabranch.machines.controller.configs import (
    DAY_MS,
    INT_MAX,
    LONG_MAX,
    TOPIC_CONFIGS,
    BrokerSettings,
    ConfigChange,
    ConfigOperation,
    ConfigType,
    TopicConfig,
    refuse_configs,
)
from anabranch.machines.controller.effects import Decision, Refused
from anabranch.machines.controller.nodes import EVERY_BROKER
from anabranch.machines.controller.state import ControllerState

OF_NO_TOPIC: Mapping[str, TopicConfig] = {
    config.name: config
    for config in (
        TopicConfig(
            "log.cleaner.backoff.ms",
            ConfigType.LONG,
            "15000",
            whole(10, LONG_MAX),
            "The interval between searches for logs to be compacted.",
        ),
        TopicConfig(
            "log.scrub.interval.ms",
            ConfigType.LONG,
            str(7 * DAY_MS),
            whole(-1, LONG_MAX),
            "The interval at which the checksums of all batches are compared; -1 is never.",
        ),
        TopicConfig(
            "log.scrub.max.bytes.per.second",
            ConfigType.LONG,
            str(20 << 20),
            whole(1 << 10, LONG_MAX),
            "The rate at which logs are read to compare checksums.",
        ),
        TopicConfig(
            "sasl.kerberos.min.time.before.relogin",
            ConfigType.LONG,
            "60000",
            whole(0, LONG_MAX),
            "Accepted; no listener authenticates by Kerberos.",
        ),
    )
}
"""The dynamic settings that no topic has, declared as topics' configs are."""
DYNAMIC: Mapping[str, TopicConfig] = {
    config.broker_setting: config
    for config in TOPIC_CONFIGS.values()
    if config.broker_setting is not None and config.name != "durability"
} | dict(OF_NO_TOPIC)
"""The dynamic settings, each with the topic's config that it is the default of. `durability` has a word more there."""
_BOOLEAN, _INT, _LIST, _STRING = ConfigType.BOOLEAN, ConfigType.INT, ConfigType.LIST, ConfigType.STRING
FIXED: Mapping[str, TopicConfig] = {
    name: TopicConfig(name, kind, value, one_of(value), f"Fixed; {documentation}")
    for name, kind, value, documentation in (
        ("authorizer.class.name", _STRING, "", "there is no authorizer: every connection may do everything."),
        ("auto.leader.rebalance.enable", _BOOLEAN, "false", "no leader moves: a partition has one replica."),
        ("background.threads", _INT, "1", "each kind of background work has one thread."),
        ("inter.broker.listener.name", _STRING, "PLAINTEXT", "there is one listener."),
        (
            "listener.security.protocol.map",
            _STRING,
            "PLAINTEXT:PLAINTEXT",
            "the only listener is neither encrypted nor authenticated.",
        ),
        ("log.cleaner.enable", _BOOLEAN, "true", "compacted topics are always compacted."),
        ("log.cleaner.threads", _INT, "1", "one log is compacted at a time."),
        ("num.io.threads", _INT, "1", "requests are handled by the broker's one event loop."),
        ("num.network.threads", _INT, "1", "connections are served by the broker's one event loop."),
        (
            "num.recovery.threads.per.data.dir",
            _INT,
            str(RECOVERY_THREADS),
            "logs are opened in so many threads when the broker starts.",
        ),
        ("process.roles", _LIST, "broker,controller", "broker and controller are one process."),
        ("remote.log.storage.system.enable", _BOOLEAN, "false", "all records are in log.dirs."),
        ("sasl.enabled.mechanisms", _LIST, "", "nobody is authenticated."),
        (
            "security.inter.broker.protocol",
            _STRING,
            "PLAINTEXT",
            "the only listener is neither encrypted nor authenticated.",
        ),
    )
}
"""Settings of Kafka's that tools look at, with what is true here; they can neither be set nor changed."""


class OlderName(NamedTuple):
    """Another name of a setting, perhaps in a coarser unit."""

    setting: str
    type: ConfigType
    unit: int
    documentation: str

    def value(self, text: str) -> str | None:
        """The value of the setting in this unit; None where that is no whole number of it, or none that fits."""
        if self.unit == 1 or text == "-1":
            return text
        whole_units, rest = divmod(int(text), self.unit)
        return None if rest or whole_units > INT_MAX else str(whole_units)


_MINUTE_MS, _HOUR_MS = 60_000, 3_600_000
OLDER: Mapping[str, OlderName] = {
    "broker.id": OlderName("node.id", _INT, 1, "Older name of node.id."),
    "log.dir": OlderName("log.dirs", _STRING, 1, "Older name of log.dirs."),
    "log.retention.hours": OlderName("log.retention.ms", _INT, _HOUR_MS, "log.retention.ms in hours."),
    "log.retention.minutes": OlderName("log.retention.ms", _INT, _MINUTE_MS, "log.retention.ms in minutes."),
    "log.roll.hours": OlderName("log.roll.ms", _INT, _HOUR_MS, "log.roll.ms in hours."),
}
"""By the older name. They are read at the start; of several names that a source gives for one setting, that with the
finest unit counts, as in Kafka."""


@dataclass(frozen=True, slots=True)
class AlterBrokerConfigs:
    """One broker of an IncrementalAlterConfigs or AlterConfigs request."""

    broker: str
    """The broker's id, or EVERY_BROKER."""
    changes: Sequence[ConfigChange]
    validate_only: bool = False
    replaces: bool = False
    """Whether the dynamic settings that are not named return to their defaults (AlterConfigs)."""


def decide_alter_broker_configs(
    state: ControllerState, command: AlterBrokerConfigs, static: Mapping[str, str]
) -> Decision[Refused | None]:
    """Change dynamic settings of a broker; None when that is done. `static`: what it was started with, all settings."""
    before = {} if command.replaces else state.broker_configs.get(command.broker, {})
    values = {name: value for name, value in before.items() if name in DYNAMIC}
    seen: set[str] = set()
    for change in command.changes:
        refusal = _refuse(change, static)
        if refusal is None and change.name in seen:
            refusal = Refused(ErrorCode.INVALID_REQUEST, f"The setting {change.name!r} is given more than once.")
        if refusal is not None:
            return Decision(reply=refusal)
        seen.add(change.name)
        if change.operation is ConfigOperation.DELETE:
            values.pop(change.name, None)
            continue
        assert change.value is not None
        if change.operation is ConfigOperation.SET:
            values[change.name] = plain(change.value) if DYNAMIC[change.name].type is ConfigType.LIST else change.value
            continue
        items = split(values.get(change.name, static.get(change.name, DYNAMIC[change.name].default)))
        given = split(change.value)
        if change.operation is ConfigOperation.APPEND:
            items += [item for item in given if item not in items]
        else:
            items = [item for item in items if item not in given]
        values[change.name] = ",".join(items)
    refused = _refuse_values(values) or refuse_configs(
        {DYNAMIC[name].name: value for name, value in values.items() if name not in OF_NO_TOPIC},
        BrokerSettings(static=static),
    )
    if refused is not None:
        return Decision(reply=refused)
    if command.validate_only:
        return Decision(reply=None)
    return Decision(reply=None, records=(nodes.put_broker_configs(command.broker, values),))


def _refuse(change: ConfigChange, static: Mapping[str, str]) -> Refused | None:
    config = DYNAMIC.get(change.name)
    if change.name in FIXED:
        return Refused(ErrorCode.INVALID_REQUEST, f"The setting {change.name!r} cannot be changed on this broker.")
    if change.name in OLDER:
        return Refused(
            ErrorCode.INVALID_REQUEST,
            f"{change.name!r} is another name of the setting {OLDER[change.name].setting!r}: change that.",
        )
    if config is None and change.name in static:
        return Refused(
            ErrorCode.INVALID_REQUEST,
            f"The setting {change.name!r} is read when the broker starts: set it there, and start the broker again.",
        )
    if config is None:
        near = get_close_matches(change.name, DYNAMIC, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return Refused(ErrorCode.INVALID_CONFIG, f"There is no setting {change.name!r}.{hint}")
    if change.operation in (ConfigOperation.APPEND, ConfigOperation.SUBTRACT) and config.type is not ConfigType.LIST:
        return Refused(
            ErrorCode.INVALID_CONFIG,
            f"{change.operation.name} is for settings that are lists, which {change.name!r} is not. Use SET.",
        )
    if change.operation is not ConfigOperation.DELETE and change.value is None:
        return Refused(
            ErrorCode.INVALID_REQUEST, f"The setting {change.name!r} needs a value for {change.operation.name}."
        )
    return None


def _refuse_values(values: Mapping[str, str]) -> Refused | None:
    """Refuse values that settings which no topic has cannot have."""
    for name, config in OF_NO_TOPIC.items():
        wanted = config.validator(values.get(name, config.default))
        if wanted is not None:
            return Refused(ErrorCode.INVALID_CONFIG, f"The setting {name!r} must be {wanted}, not {values[name]!r}.")
    return None


def broker_of(name: str) -> str | None:
    """The key of a broker's configs by the name of its resource: an id, or no name for all; None for neither."""
    if not name:
        return EVERY_BROKER
    return name if is_whole(name) else None
