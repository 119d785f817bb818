"""Groups that do one thing wrong are found out by the rules of `groups_rules`, and within a few lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.clients.membership import strategies
from anabranch.machines.clients.membership.consumer import ConsumerMember
from anabranch.machines.groups import gates, migration, offsets
from anabranch.machines.groups.consumer import heartbeat
from anabranch.machines.groups.consumer.group import NOTHING, ConsumerGroup, Member
from anabranch.machines.groups.consumer.step import Step
from anabranch.machines.outcome import SetTimer
from tests.simulation.groups import live

SEEDS_MAX = 60


def believing() -> AbstractContextManager[object]:
    """What a member has to let go of is given to others before it says that it did."""
    reconcile = heartbeat.reconcile
    return mock.patch.object(
        heartbeat, "reconcile", lambda group, member, _, waits: reconcile(group, member, NOTHING, waits)
    )


def forgetting() -> AbstractContextManager[object]:
    """A member that lets go of a partition late, in a log that was compacted meanwhile, takes it from its new owner."""

    def let_go(group: ConsumerGroup, member: Member) -> None:
        for partition in member.holds:
            group.holders.pop(partition, None)

    return mock.patch.object(ConsumerGroup, "_let_go", let_go)


def hasty() -> AbstractContextManager[object]:
    """A member takes what it has just told the coordinator not to own."""
    return mock.patch.object(ConsumerMember, "_unsure", property(lambda _: False, lambda _, __: None), create=True)


def trusting() -> AbstractContextManager[object]:
    """Whoever commits is believed to be a member."""
    return mock.patch.object(offsets, "_commit_error", return_value=ErrorCode.NONE)


def impatient() -> AbstractContextManager[object]:
    """Sessions end too early."""

    def keep_session(step: Step, member: Member) -> None:
        timeout_ms = step.configs.session_timeout_ms // 3
        step.timers.append(SetTimer(("session", step.group_id, member.member_id), step.now_ms + timeout_ms))

    return mock.patch.object(Step, "keep_session", keep_session)


def moving_on() -> AbstractContextManager[object]:
    """What classic members are letting go of is forgotten when their group moves to the other protocol."""
    return mock.patch.object(migration, "assignment_of", return_value=NOTHING)


def overtaking() -> AbstractContextManager[object]:
    """Partitions are given though records that come before theirs are unread."""
    return mock.patch.object(gates, "closed_partitions", return_value=frozenset())


def uncooperative() -> AbstractContextManager[object]:
    """A classic leader gives a partition to another member in the same rebalance in which its owner loses it."""

    def cooperative(members: Iterable[strategies.Subscriber], counts: dict[str, int]) -> Any:
        return strategies._sticky(list(members), counts)[0]

    return mock.patch.object(strategies, "_cooperative", cooperative)


def lives(**changed: Any) -> None:
    for seed in range(SEEDS_MAX):
        live(seed, **changed)


@pytest.mark.parametrize(
    ("sabotage", "theme"),
    [
        (believing, {}),
        (forgetting, {}),
        (hasty, {}),
        (trusting, {}),
        (impatient, {}),
        (moving_on, {"classic": 0.5, "strategies": (("cooperative-sticky",),)}),
        (overtaking, {"ordered": 1.0, "topics": 15, "classic": 0.0}),
        (uncooperative, {"classic": 1.0, "strategies": (("cooperative-sticky",),)}),
    ],
)
def test_a_group_that_does_it_wrong_is_found_out(
    sabotage: Callable[[], AbstractContextManager[object]], theme: dict[str, Any]
) -> None:
    with sabotage(), pytest.raises(AssertionError, match="the whole story"):
        lives(**theme)
