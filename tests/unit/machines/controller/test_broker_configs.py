"""Dynamic settings of brokers: what may be changed, to what, and what is refused."""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.broker_configs import (
    DYNAMIC,
    AlterBrokerConfigs,
    broker_of,
    decide_alter_broker_configs,
)
from anabranch.machines.controller.configs import ConfigChange, ConfigOperation
from anabranch.machines.controller.effects import Refused
from anabranch.machines.controller.nodes import EVERY_BROKER
from anabranch.machines.controller.state import ControllerState, apply

SET, DELETE, APPEND, SUBTRACT = (
    ConfigOperation.SET,
    ConfigOperation.DELETE,
    ConfigOperation.APPEND,
    ConfigOperation.SUBTRACT,
)
Change = tuple[str, ConfigOperation, str | None]
STATIC = {"log.retention.ms": "7", "listeners": "localhost:9092", "log.cleanup.policy": "delete"}


def alter(state: ControllerState, *changes: Change, validate: bool = False, replaces: bool = False) -> Refused | None:
    given = [ConfigChange(name, operation, value) for name, operation, value in changes]
    decided = decide_alter_broker_configs(state, AlterBrokerConfigs("1", given, validate, replaces), STATIC)
    for record in decided.records:
        apply(state, record)
    return decided.reply


def test_settings_are_set_taken_back_and_changed_item_by_item() -> None:
    state = ControllerState()
    assert alter(state, ("log.retention.ms", SET, "9"), ("log.cleanup.policy", APPEND, "compact")) is None
    assert state.broker_configs == {"1": {"log.retention.ms": "9", "log.cleanup.policy": "delete,compact"}}
    assert alter(state, ("log.retention.ms", DELETE, None), ("log.cleanup.policy", SUBTRACT, "delete")) is None
    assert state.broker_configs == {"1": {"log.cleanup.policy": "compact"}}
    assert alter(state, ("log.cleanup.policy", SET, " compact," + 60_000 * " ")) is None
    assert state.broker_configs == {"1": {"log.cleanup.policy": "compact"}}, "in its plain form"
    assert alter(state, ("log.cleanup.policy", DELETE, None), validate=True) is None
    assert state.broker_configs == {"1": {"log.cleanup.policy": "compact"}}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (("listeners", SET, "x:1"), ErrorCode.INVALID_REQUEST, "when the broker starts"),
        (("num.io.threads", SET, "8"), ErrorCode.INVALID_REQUEST, "cannot be changed"),
        (("log.retention.m", SET, "1"), ErrorCode.INVALID_CONFIG, "Did you mean 'log.retention.ms'?"),
        (("log.retention.ms", SET, "soon"), ErrorCode.INVALID_CONFIG, "must be a whole number"),
        (("log.retention.ms", SET, None), ErrorCode.INVALID_REQUEST, "needs a value"),
        (("log.retention.ms", APPEND, "1"), ErrorCode.INVALID_CONFIG, "Use SET"),
        (("log.cleanup.policy", SUBTRACT, "delete"), ErrorCode.INVALID_CONFIG, "one or more"),
    ],
)
def test_what_cannot_be_is_refused(change: Change, code: ErrorCode, words: str) -> None:
    state = ControllerState()
    refused = alter(state, ("log.roll.ms", SET, "5000"), change)
    assert refused is not None
    assert refused.code is code
    assert words in refused.message
    assert state.broker_configs == {}, "all or nothing"


def test_a_setting_is_given_once() -> None:
    refused = alter(ControllerState(), ("log.roll.ms", SET, "5000"), ("log.roll.ms", DELETE, None))
    assert refused is not None
    assert "more than once" in refused.message


def test_a_replacement_takes_back_what_it_does_not_name() -> None:
    state = ControllerState()
    assert alter(state, ("log.retention.ms", SET, "9"), ("log.cleanup.policy", SET, "compact")) is None
    refused = alter(state, ("log.roll.ms", SET, "5000"), ("log.roll.ms", SET, "6000"), replaces=True)
    assert refused is not None and "more than once" in refused.message
    refused = alter(state, ("log.roll.ms", SET, None), replaces=True)
    assert refused is not None and refused.code is ErrorCode.INVALID_REQUEST, "as Kafka does"
    assert alter(state, ("log.roll.ms", SET, "5000"), replaces=True, validate=True) is None
    assert state.broker_configs == {"1": {"log.retention.ms": "9", "log.cleanup.policy": "compact"}}
    assert alter(state, ("log.roll.ms", SET, "5000"), replaces=True) is None
    assert state.broker_configs == {"1": {"log.roll.ms": "5000"}}
    assert alter(state, replaces=True) is None
    assert state.broker_configs.get("1", {}) == {}


def test_resources_name_a_broker_or_all() -> None:
    assert [broker_of(name) for name in ("", "1", "x", "-1")] == [EVERY_BROKER, "1", None, None]
    assert "durability" not in DYNAMIC
