"""IncrementalAlterConfigs of a group: what is refused, with which words, and what is written."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import group_configs
from anabranch.machines.controller.configs import (
    NOT_SET,
    BrokerSettings,
    ConfigChange,
    ConfigOperation,
    ConfigSource,
    Synonym,
)
from anabranch.machines.controller.effects import Refused
from anabranch.machines.controller.group_configs import (
    HEARTBEAT_INTERVAL,
    SESSION_TIMEOUT,
    AlterGroupConfigs,
    GroupConfig,
    decide_alter_group_configs,
    group_synonyms,
    within_bounds,
)
from anabranch.machines.controller.state import ControllerState, apply

KNOWN = {
    SESSION_TIMEOUT: GroupConfig(SESSION_TIMEOUT, 45_000, 6_000, 60_000, "", ""),
    HEARTBEAT_INTERVAL: GroupConfig(HEARTBEAT_INTERVAL, 5_000, 1_000, 15_000, "", ""),
}
SET, DELETE, APPEND = ConfigOperation.SET, ConfigOperation.DELETE, ConfigOperation.APPEND


def alter(
    state: ControllerState, *changes: ConfigChange, group: str = "g", validate_only: bool = False
) -> Refused | None:
    decision = decide_alter_group_configs(state, AlterGroupConfigs(group, changes, validate_only), KNOWN)
    for record in decision.records:
        apply(state, record)
    return decision.reply


def test_configs_are_set_changed_and_deleted() -> None:
    state = ControllerState()
    assert (
        alter(state, ConfigChange(SESSION_TIMEOUT, SET, "50000"), ConfigChange(HEARTBEAT_INTERVAL, SET, "2000")) is None
    )
    assert state.group_configs == {"g": {SESSION_TIMEOUT: "50000", HEARTBEAT_INTERVAL: "2000"}}
    assert alter(state, ConfigChange(SESSION_TIMEOUT, SET, "50000" + 60_000 * " ")) is None
    assert state.group_configs["g"][SESSION_TIMEOUT] == "50000"
    assert alter(state, ConfigChange(SESSION_TIMEOUT, DELETE, None)) is None
    assert state.group_configs == {"g": {HEARTBEAT_INTERVAL: "2000"}}
    assert alter(state, ConfigChange(HEARTBEAT_INTERVAL, DELETE, None)) is None
    assert state.group_configs == {}


def test_validating_writes_nothing() -> None:
    state = ControllerState()
    assert alter(state, ConfigChange(SESSION_TIMEOUT, SET, "50000"), validate_only=True) is None
    assert state.group_configs == {}


@pytest.mark.parametrize(
    "value", ["5999", "60001", "-1", "1e4", "", "٥٠٠٠٠", "9" * 40, "50000".zfill(19) + "7", "50000".zfill(9_000)]
)
def test_a_value_out_of_the_brokers_bounds_or_no_number_is_refused(value: str) -> None:
    refused = alter(ControllerState(), ConfigChange(SESSION_TIMEOUT, SET, value))
    assert refused is not None and refused.code is ErrorCode.INVALID_CONFIG
    assert "from 6000 to 60000" in refused.message


def test_groups_with_configs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_configs, "CONFIGURED_GROUPS_MAX", 3)
    state = ControllerState()
    for name in "abc":
        assert alter(state, ConfigChange(SESSION_TIMEOUT, SET, "50000"), group=name) is None
    refused = alter(state, ConfigChange(SESSION_TIMEOUT, SET, "50000"), group="d")
    assert refused is not None and refused.code is ErrorCode.POLICY_VIOLATION
    assert alter(state, ConfigChange(SESSION_TIMEOUT, SET, "51000"), group="a") is None, "it has configs"
    assert alter(state, ConfigChange(SESSION_TIMEOUT, DELETE, None), group="b") is None
    assert alter(state, ConfigChange(SESSION_TIMEOUT, SET, "50000"), group="d") is None
    long = alter(ControllerState(), ConfigChange(SESSION_TIMEOUT, SET, "50000"), group="x" * 1_001)
    assert long is not None and long.code is ErrorCode.INVALID_REQUEST


def test_a_session_must_outlast_a_heartbeat_also_against_what_is_set_already() -> None:
    state = ControllerState()
    assert alter(state, ConfigChange(HEARTBEAT_INTERVAL, SET, "10000")) is None
    refused = alter(state, ConfigChange(SESSION_TIMEOUT, SET, "10000"))
    assert refused is not None and refused.code is ErrorCode.INVALID_CONFIG and "must be above" in refused.message


@pytest.mark.parametrize(
    ("changes", "group", "code", "words"),
    [
        ([], "", ErrorCode.INVALID_REQUEST, "group's id"),
        ([ConfigChange("retention.ms", SET, "1")], "g", ErrorCode.INVALID_CONFIG, "no group config 'retention.ms'"),
        ([ConfigChange(SESSION_TIMEOUT, SET, "50000")] * 2, "g", ErrorCode.INVALID_REQUEST, "more than once"),
        ([ConfigChange(SESSION_TIMEOUT, APPEND, "1")], "g", ErrorCode.INVALID_CONFIG, "Use SET"),
        ([ConfigChange(SESSION_TIMEOUT, SET, None)], "g", ErrorCode.INVALID_REQUEST, "needs a value"),
    ],
)
def test_refusals_say_what_is_wrong(changes: list[ConfigChange], group: str, code: ErrorCode, words: str) -> None:
    state = ControllerState()
    refused = alter(state, *changes, group=group)
    assert refused is not None and refused.code is code and words in refused.message
    assert state.group_configs == {}


def test_the_value_of_a_config_comes_from_the_group_then_from_the_broker() -> None:
    config = GroupConfig(SESSION_TIMEOUT, 45_000, 1, 60_000, "", "group.consumer.session.timeout.ms")
    default = Synonym(config.broker_setting, "45000", ConfigSource.DEFAULT_CONFIG)
    assert group_synonyms(config, {}, NOT_SET) == (default,)
    of_group = Synonym(SESSION_TIMEOUT, "50000", ConfigSource.GROUP_CONFIG)
    assert group_synonyms(config, {SESSION_TIMEOUT: "50000"}, NOT_SET) == (of_group, default)
    (static,) = group_synonyms(config, {}, BrokerSettings(static={config.broker_setting: "45000"}))
    assert static == default._replace(source=ConfigSource.STATIC_BROKER_CONFIG)


def test_overrides_of_earlier_bounds_move_to_the_nearest_bound_and_unknown_ones_are_dropped() -> None:
    overrides = {SESSION_TIMEOUT: "70000", HEARTBEAT_INTERVAL: "1", "of.a.later.version": "x"}
    assert within_bounds(overrides, KNOWN) == {SESSION_TIMEOUT: "60000", HEARTBEAT_INTERVAL: "1000"}
    assert within_bounds({SESSION_TIMEOUT: "45001"}, KNOWN) == {SESSION_TIMEOUT: "45001"}
    assert within_bounds({}, KNOWN) == {}
