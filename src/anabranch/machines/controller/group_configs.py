"""Configs of groups (KIP-848): their table, the values each accepts, and the command that changes them.

A group need not exist to have configs. Bounds and defaults are settings of the broker (`group.consumer.*`), so that an
operator limits the owners of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import is_whole
from anabranch.base.limits import CONFIGURED_GROUPS_MAX, GROUP_ID_LENGTH_MAX
from anabranch.machines.controller import nodes
from anabranch.machines.controller.configs import BrokerSettings, ConfigChange, ConfigOperation, ConfigSource, Synonym
from anabranch.machines.controller.effects import Decision, Refused
from anabranch.machines.controller.state import ControllerState

SESSION_TIMEOUT = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL = "consumer.heartbeat.interval.ms"
SHARES_MAX = "max.shares.per.partition"
DIGITS_MAX = 19


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """One config of groups, with the bounds that the broker sets; all of them are whole numbers."""

    name: str
    default: int
    least: int
    most: int
    documentation: str
    broker_setting: str


def group_synonyms(
    config: GroupConfig, overrides: Mapping[str, str], broker_settings: BrokerSettings
) -> tuple[Synonym, ...]:
    """Return every source that gives a group's config a value; the first takes effect."""
    static = config.broker_setting in broker_settings.static
    source = ConfigSource.STATIC_BROKER_CONFIG if static else ConfigSource.DEFAULT_CONFIG
    of_broker = Synonym(config.broker_setting, str(config.default), source)
    if config.name not in overrides:
        return (of_broker,)
    return Synonym(config.name, overrides[config.name], ConfigSource.GROUP_CONFIG), of_broker


def within_bounds(overrides: Mapping[str, str], known: Mapping[str, GroupConfig]) -> dict[str, str]:
    """Return the known overrides, each moved to the nearest bound that the broker has now if it lies outside."""
    return {
        name: str(min(max(int(value), known[name].least), known[name].most))
        for name, value in overrides.items()
        if name in known
    }


@dataclass(frozen=True, slots=True)
class AlterGroupConfigs:
    """One group of an IncrementalAlterConfigs request."""

    group: str
    changes: Sequence[ConfigChange]
    validate_only: bool = False


def decide_alter_group_configs(
    state: ControllerState, command: AlterGroupConfigs, known: Mapping[str, GroupConfig]
) -> Decision[Refused | None]:
    """Change configs of a group; None when that is done."""
    if not command.group:
        return _refused(ErrorCode.INVALID_REQUEST, "A group's configs need the group's id; there are no defaults.")
    if len(command.group) > GROUP_ID_LENGTH_MAX:
        return _refused(
            ErrorCode.INVALID_REQUEST,
            f"The id of a group with configs has {GROUP_ID_LENGTH_MAX} characters at most, not {len(command.group)}.",
        )
    if command.group not in state.group_configs and len(state.group_configs) >= CONFIGURED_GROUPS_MAX:
        return _refused(
            ErrorCode.POLICY_VIOLATION,
            f"{CONFIGURED_GROUPS_MAX} groups have configs of their own, which is as many as there may be. Delete those "
            "of groups that are gone.",
        )
    overrides = dict(state.group_configs.get(command.group, {}))
    seen: set[str] = set()
    for change in command.changes:
        if change.name not in known:
            names = ", ".join(known)
            return _refused(ErrorCode.INVALID_CONFIG, f"There is no group config {change.name!r}; there are {names}.")
        if change.name in seen:
            return _refused(ErrorCode.INVALID_REQUEST, f"The config {change.name!r} is given more than once.")
        seen.add(change.name)
        if change.operation is ConfigOperation.DELETE:
            overrides.pop(change.name, None)
        elif change.operation is not ConfigOperation.SET:
            return _refused(
                ErrorCode.INVALID_CONFIG,
                f"{change.operation.name} is for configs that are lists, which {change.name!r} is not. Use SET.",
            )
        elif change.value is None:
            return _refused(ErrorCode.INVALID_REQUEST, f"The config {change.name!r} needs a value for SET.")
        else:
            overrides[change.name] = change.value.strip()
    refusal = _refuse(overrides, known)
    if refusal is not None:
        return Decision(reply=refusal)
    if command.validate_only:
        return Decision(reply=None)
    record = (
        nodes.put_group_configs(command.group, overrides) if overrides else nodes.delete_group_configs(command.group)
    )
    return Decision(reply=None, records=(record,))


def _refuse(overrides: Mapping[str, str], known: Mapping[str, GroupConfig]) -> Refused | None:
    for name, value in overrides.items():
        config = known[name]
        digits = value.strip()
        number = int(digits) if len(digits) <= DIGITS_MAX and is_whole(digits) else -1
        if not config.least <= number <= config.most:
            return Refused(
                ErrorCode.INVALID_CONFIG,
                f"The config {name!r} must be a whole number from {config.least} to {config.most}, not {value!r}; the "
                f"bounds are settings of the broker.",
            )
    session, heartbeat = (
        int(overrides.get(name, known[name].default)) for name in (SESSION_TIMEOUT, HEARTBEAT_INTERVAL)
    )
    if session <= heartbeat:
        return Refused(
            ErrorCode.INVALID_CONFIG,
            f"The config {SESSION_TIMEOUT!r} ({session}) must be above {HEARTBEAT_INTERVAL!r} ({heartbeat}).",
        )
    return None


def _refused(code: ErrorCode, message: str) -> Decision[Refused | None]:
    return Decision(reply=Refused(code, message))
