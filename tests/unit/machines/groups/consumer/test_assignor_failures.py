"""A server-side assignor that raises, answers nonsense or is not offered any more: its group alone is concerned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.assignors import Assignors
from anabranch.machines.groups.assignors.spec import Assignor, AssignorError
from anabranch.machines.groups.consumer.target import AssignorFailed
from anabranch.machines.groups.settings import GroupSettings
from tests.support.groups import GroupWorld, topics

GROUPS = ("a", "g", "z")


class Fickle:
    """The plug-in `fickle`: gives everything to the first member, as long as it works."""

    def __init__(self) -> None:
        self.fault: Callable[[Any], Any] | None = None

    def load(self) -> Assignor:
        return self

    def __call__(self, spec: Any) -> Any:
        if self.fault is not None:
            return self.fault(spec)
        return np.zeros(len(spec.owner), np.int32)


def raises(spec: Any) -> Any:
    raise ZeroDivisionError("a bug of the plug-in")


def spoils(spec: Any) -> Any:
    spec.owner.fill(min(1, spec.members - 1))
    raise ZeroDivisionError("after a change of its input")


FAULTS = {
    "raises": raises,
    "spoils its input": spoils,
    "a list": lambda spec: [0] * len(spec.owner),
    "too short": lambda spec: np.zeros(1, np.int32),
    "no member": lambda spec: np.full(len(spec.owner), spec.members, np.int32),
    "none": lambda spec: None,
}


def world_of(
    plug_in: Fickle, *, offered: tuple[str, ...] = ("uniform", "range", "fickle"), **counts: int
) -> GroupWorld:
    settings = GroupSettings(
        consumer_assignors=offered, assignors=Assignors({"fickle": plug_in.load}), offsets_retention_check_interval_ms=1
    )
    return GroupWorld(topics(**(counts or {"foo": 3})), settings)


def failures(world: GroupWorld) -> list[tuple[str, str, str]]:
    found = [effect for effect in world.effects if isinstance(effect, AssignorFailed)]
    return [(effect.group_id, effect.assignor, type(effect.error).__name__) for effect in found]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_group_whose_assignor_fails_keeps_its_assignment_and_the_failure_is_reported_once(fault: str) -> None:
    plug_in = Fickle()
    world = world_of(plug_in)
    world.join("A", server_assignor="fickle")
    plug_in.fault = FAULTS[fault]
    answer = world.join("B", server_assignor="fickle")
    assert (answer.member_epoch, world.told(answer)) == (2, "")
    assert world.beat("A", 1, "foo-0 foo-1 foo-2").member_epoch == 2
    assert world.named(world.group.target("A")) == "foo-0 foo-1 foo-2"
    assert (world.group.epoch, world.group.target_epoch) == (2, 2)
    assert world.join("C", server_assignor="fickle").error_code == ErrorCode.NONE
    assert [(group, name) for group, name, _ in failures(world)] == [("g", "fickle")]
    world.check()

    plug_in.fault = None
    world.leave("A")
    assert world.named(world.group.target("B")) == "foo-0 foo-1 foo-2", "it works again"
    plug_in.fault = FAULTS[fault]
    world.leave("C")
    assert len(failures(world)) == 2, "another failure"


def test_the_error_of_the_assignor_is_reported() -> None:
    plug_in = Fickle()
    plug_in.fault = FAULTS["no member"]
    world = world_of(plug_in)
    world.join("A", server_assignor="fickle")
    (effect,) = world.effects
    assert isinstance(effect.error, AssignorError)


def test_partitions_that_are_gone_or_not_subscribed_to_are_not_kept() -> None:
    plug_in = Fickle()
    world = world_of(plug_in, foo=3, bar=2)
    world.join("A", topics=["foo", "bar"], server_assignor="fickle")
    plug_in.fault = raises
    world.set_topics(topics(2, foo=2, bar=2))
    assert world.named(world.group.target("A")) == "bar-0 bar-1 foo-0 foo-1"
    world.beat("A", 1, topics=["foo"])
    assert world.named(world.group.target("A")) == "foo-0 foo-1"
    world.set_topics(topics(3, bar=2))
    assert world.group.target("A") == ()
    world.check()


def test_after_a_fail_over_every_group_of_the_shard_has_its_session_timers() -> None:
    plug_in = Fickle()
    world = world_of(plug_in)
    for group in GROUPS:
        world.join(f"{group}-1", group=group, server_assignor="fickle" if group == "g" else None)
    plug_in.fault = raises
    world.image = topics(2, foo=4)  # An assignment of every group is due.
    world.reload()
    assert {key for key in world.timers if key[0] == "session"} == {  # type: ignore[index]
        ("session", group, f"{group}-1") for group in GROUPS
    }
    assert failures(world) == [("g", "fickle", "ZeroDivisionError")]
    world.set_topics(topics(3, foo=5))
    for group in GROUPS:
        assert world.coordinator.groups[group].target_epoch == 3  # type: ignore[union-attr]
    world.check()


def test_a_plug_in_that_cannot_be_imported_harms_its_group_only() -> None:
    def load() -> Assignor:
        raise ImportError("a dependency of the plug-in is missing")

    settings = GroupSettings(consumer_assignors=("uniform", "broken"), assignors=Assignors({"broken": load}))
    world = GroupWorld(settings=settings)
    assert world.told(world.join("A", server_assignor="broken")) == ""
    assert failures(world) == [("g", "broken", "ImportError")]
    assert world.told(world.join("B", group="other")) == "foo-0 foo-1 foo-2"


def test_a_group_whose_assignor_is_offered_no_more_gets_the_brokers_first() -> None:
    world = world_of(Fickle())
    world.join("A", server_assignor="fickle")
    world.join("B", server_assignor="fickle")
    assert world.named(world.group.target("B")) == ""
    world.settings = GroupSettings(consumer_assignors=("range", "uniform"))
    world.image = topics(2, foo=4)
    world.reload()
    assert world.named(world.group.target("A")) == "foo-0 foo-1"
    assert failures(world) == [("g", "fickle", "NoneType")]
    assert world.coordinator.describe_consumer_group("g").assignor_name == "range"
    world.join("C")
    assert len(failures(world)) == 1, "reported once"


def test_members_choose_among_the_assignors_that_the_setting_lists() -> None:
    world = world_of(Fickle(), offered=("uniform",))
    for name in ("range", "fickle", "foo"):
        answer = world.beat("A", 0, "", topics=["foo"], server_assignor=name, rebalance_timeout_ms=1)
        assert answer.error_code == ErrorCode.UNSUPPORTED_ASSIGNOR
        assert answer.error_message == f"The server-side assignor '{name}' is not offered; choose of uniform."
    assert not world.coordinator.groups
