"""Mutants of the group machines and drivers: the rules of `groups_rules` detect each within a few lives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client.consumer.member_driver import MemberDriver
from anabranch.machines.clients.membership import strategies
from anabranch.machines.clients.membership.consumer import ConsumerMember
from anabranch.machines.groups import gates, migration, offsets, positions_asked, standing
from anabranch.machines.groups.consumer import heartbeat
from anabranch.machines.groups.consumer.group import NOTHING, ConsumerGroup, Member
from anabranch.machines.groups.consumer.step import Step
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.standing import Standing
from anabranch.machines.lineage import Gates
from anabranch.runtime.timers import Timers
from anabranch.server.coordinators.durable_replies import DurableReplies
from anabranch.server.coordinators.shard import Shard
from anabranch.server.coordinators.shard_state import MESSAGES, ShardState
from tests.simulation.groups import live
from tests.simulation.groups_stories import (
    an_owner_that_comes_back_has_all_its_time,
    another_owner_has_all_its_time,
    records_before_a_gate_are_compacted_away,
    records_before_a_gate_are_deleted,
    unread_records_were_deleted,
)

SEEDS_MAX = 60
RESTLESS = {"topics": 15, "pace_ms": 300, "crashes": 0, "faults": 0.0, "length_ms": 50_000}
SILENT_FOR_LONG = {"poll_interval_ms": 4_000, "session_timeout_ms": 16_000}
HIDDEN = {
    "groups": 1,
    "clients": 6,
    "topics": 15,
    "pace_ms": 300,
    "crashes": 0,
    "faults": 4.0,
    "length_ms": 50_000,
    "slow": 0.0,
    "static": 0.0,
    "ordered": 0.0,
    "local_assignors": 0.0,
}
"""Answers are lost while topics appear that members do not know yet."""
COMPACTED = {
    "compacted": 1.0,
    "ordered": 1.0,
    "classic": 0.0,
    "topics": 15,
    "pace_ms": 300,
    "records_ms": 300,
    "keys": 4,
    "markers": 0.0,
    "crashes": 0,
    "faults": 0.0,
    "length_ms": 15_000,
}
"""Of what a gate waits for, nothing may be left but what has newer records."""
MOVING = {
    "groups": 3,
    "clients": 4,
    "topics": 6,
    "pace_ms": 300,
    "crashes": 0,
    "faults": 0.0,
    "length_ms": 15_000,
    "slow": 1.0,
    "initial_delay_ms": 0,
    "poll_interval_ms": 20_000,
    "session_timeout_ms": 16_000,
}


def believing() -> AbstractContextManager[object]:
    """Partitions to be revoked are assigned to others before the member has acknowledged the revocation."""
    reconcile = heartbeat.reconcile
    return mock.patch.object(
        heartbeat, "reconcile", lambda group, member, _, *gates: reconcile(group, member, NOTHING, *gates)
    )


def forgetting() -> AbstractContextManager[object]:
    """A late revocation, in a log compacted meanwhile, takes the partition from its new owner."""

    def let_go(group: ConsumerGroup, member: Member) -> None:
        for partition in member.holds:
            group.holders.pop(partition, None)

    return mock.patch.object(ConsumerGroup, "_let_go", let_go)


def hasty() -> AbstractContextManager[object]:
    """A member assigns partitions that its last heartbeat excluded."""
    return mock.patch.object(ConsumerMember, "_unsure", property(lambda _: False, lambda _, __: None), create=True)


def trusting() -> AbstractContextManager[object]:
    """Every committer counts as a member."""
    return mock.patch.object(offsets, "request_error", return_value=ErrorCode.NONE)


def impatient() -> AbstractContextManager[object]:
    """Sessions end too early."""

    def keep_session(step: Step, member: Member) -> None:
        timeout_ms = step.configs.session_timeout_ms // 3
        step.draft.set_timer(("session", step.group_id, member.member_id), step.now_ms + timeout_ms)

    return mock.patch.object(Step, "keep_session", keep_session)


def moving_on() -> AbstractContextManager[object]:
    """Pending revocations of classic members are dropped when their group moves to the other protocol."""
    return mock.patch.object(migration, "assignment_of", return_value=NOTHING)


def overtaking() -> AbstractContextManager[object]:
    """Partitions are assigned although earlier records of their keys are unread."""
    return mock.patch.object(gates, "judge", return_value=gates.OPEN)


def uncooperative() -> AbstractContextManager[object]:
    """A classic leader gives a partition to another member in the same rebalance in which its owner loses it."""

    def cooperative(members: Iterable[strategies.Subscriber], counts: dict[str, int]) -> Any:
        return strategies._sticky(list(members), counts)[0]

    return mock.patch.object(strategies, "_cooperative", cooperative)


def waiting_forever() -> AbstractContextManager[object]:
    """After a fail-over no revocation has a deadline."""
    loaded = Coordinator.loaded

    def load(self: Coordinator, now_ms: int) -> Any:
        with mock.patch.object(Step, "expect_within_rebalance_timeout"):
            return loaded(self, now_ms)

    return mock.patch.object(Coordinator, "loaded", load)


def remembering() -> AbstractContextManager[object]:
    """The time without commits in a partition counts on although its owner had to revoke the partition meanwhile."""
    begin = Standing.begin_tenure
    first: dict[tuple[UUID, int, str], int] = {}

    def keep(self: Standing, topic: TopicImage, partition: int, member_id: str, timeout_ms: int, now_ms: int) -> None:
        since_ms = first.setdefault((topic.topic_id, partition, member_id), now_ms)
        begin(self, topic, partition, member_id, timeout_ms, since_ms)

    return mock.patch.object(Standing, "begin_tenure", keep)


def starting_at_zero() -> AbstractContextManager[object]:
    """A partition without commits counts as unread from offset 0, though its log starts later."""
    return mock.patch.object(standing, "progress", lambda raw, log_start, next_record: max(raw, 0))


def waiting_for_what_nobody_can_read() -> AbstractContextManager[object]:
    """A partition counts as read up to what is committed, whatever the leader says of what follows."""
    return mock.patch.object(standing, "progress", lambda raw, log_start, next_record: max(raw, log_start))


def never_forgetting() -> AbstractContextManager[object]:
    """The farthest position that a partition ever counted for counts for ever, whoever owns it."""
    raw = Standing.raw
    farthest: dict[tuple[UUID, int], int] = {}

    def kept(self: Standing, topic: TopicImage, partition: int, *given: Any) -> int:
        at = topic.topic_id, partition
        farthest[at] = max(raw(self, topic, partition, *given), farthest.get(at, -1))
        return farthest[at]

    return mock.patch.object(Standing, "raw", kept)


def dawdling() -> AbstractContextManager[object]:
    """The coordinator seldom looks at what partitions wait for."""
    return mock.patch.object(positions_asked, "LOOK_MS", 60_000)


def taking_a_commit_for_all() -> AbstractContextManager[object]:
    """A partition with any committed offset counts as read to its end."""
    raw = Standing.raw

    def all_of_it(self: Standing, topic: TopicImage, partition: int, committed: int | None, *given: Any) -> int:
        return topic.log_end(partition) if committed is not None else raw(self, topic, partition, committed, *given)

    return mock.patch.object(Standing, "raw", all_of_it)


def looking_one_layout_too_low() -> AbstractContextManager[object]:
    """The gate of the layout before is taken for a partition's own."""
    judge = gates.judge

    class Low:
        def __init__(self, found: Gates) -> None:
            self.limit, self.waits, self._found = found.limit, found.waits, found

        def may_deliver(self, partition: int, layout: int) -> bool:
            return layout == 0 or self._found.may_deliver(partition, layout - 1)

    def low(topic: TopicImage, found: Gates, *given: Any) -> gates.Verdict:
        return judge(topic, Low(found), *given)  # type: ignore[arg-type]

    return mock.patch.object(gates, "judge", low)


def hoarding() -> AbstractContextManager[object]:
    """Committed offsets are kept beyond the retention time."""
    return mock.patch.object(offsets.Offsets, "expired", return_value=([], False))


def answering_early() -> AbstractContextManager[object]:
    """The shard sends replies that are based on records that are not durable."""
    return mock.patch.object(DurableReplies, "when", lambda self, reply: reply)


def trusting_its_log() -> AbstractContextManager[object]:
    """The shard keeps a machine that has applied records lost by the log."""

    def fail(self: Any, *_: object) -> None:
        self._committing = None

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Shard, "_fail", fail))
    stack.enter_context(mock.patch.dict(MESSAGES, {ShardState.ACTIVE: "The log has lost records."}))
    return stack


def sleeping() -> AbstractContextManager[object]:
    """No timer fires."""
    return mock.patch.object(Timers, "_wake")


def incurious() -> AbstractContextManager[object]:
    """The client's driver does not look up the topics that its member requests."""

    async def learn_nothing(self: MemberDriver) -> None:
        pass

    return mock.patch.object(MemberDriver, "_learn_topics", learn_nothing)


def sulking() -> AbstractContextManager[object]:
    """The client's driver does not report failed requests to its member."""
    send = MemberDriver._send

    async def send_once(self: MemberDriver, step: Any) -> None:
        with mock.patch.object(self._member, "on_error"):
            await send(self, step)

    return mock.patch.object(MemberDriver, "_send", send_once)


def found_out(sabotage: Callable[[], AbstractContextManager[object]], theme: dict[str, Any], first: int = 0) -> int:
    """Return a seed, the first from `first` on, that fails under a sabotage, by a rule; AssertionError without one."""
    with sabotage():
        for seed in range(first, first + SEEDS_MAX):
            try:
                live(seed, **theme)
            except AssertionError as failure:
                if isinstance(failure.__cause__, AssertionError):
                    return seed
                raise  # an accident of the sabotage, which no rule found
    raise AssertionError(f"seeds {first} to {first + SEEDS_MAX - 1} end well")


@pytest.mark.parametrize(
    ("sabotage", "theme"),
    [
        (believing, {}),
        (forgetting, {}),
        (hasty, {**HIDDEN, "classic": 0.0}),
        (trusting, {}),
        (impatient, {}),
        (moving_on, {**MOVING, "faults": 1.0, "classic": 0.7, "strategies": (("cooperative-sticky",),), "first": 22}),
        (overtaking, {"ordered": 1.0, "topics": 15, "classic": 0.0}),
        (uncooperative, {"classic": 1.0, "strategies": (("cooperative-sticky",),)}),
        (waiting_forever, {**RESTLESS, "crashes": 15, "slow": 1.0, "classic": 0.0, **SILENT_FOR_LONG}),
        (taking_a_commit_for_all, {**RESTLESS, "ordered": 1.0, "classic": 0.0}),
        (looking_one_layout_too_low, {**RESTLESS, "ordered": 1.0, "classic": 0.0}),
        (waiting_for_what_nobody_can_read, {**COMPACTED, "first": 16}),
        (hoarding, {"retention_ms": 20_000}),
        (answering_early, {"slow_syncs": 0.1}),
        (trusting_its_log, {"crashes": 15}),
        (sleeping, {}),
        (incurious, {"classic": 1.0}),
        (sulking, {}),
    ],
)
def test_a_group_that_does_it_wrong_is_found_out(
    sabotage: Callable[[], AbstractContextManager[object]], theme: dict[str, Any]
) -> None:
    """The seed that finds it out ends well without the sabotage; `first`: the seed to begin with, 0 without one."""
    theme = dict(theme)
    seed = found_out(sabotage, theme, theme.pop("first", 0))
    live(seed, **theme)


@pytest.mark.parametrize(
    ("sabotage", "story", "why"),
    [
        (starting_at_zero, unread_records_were_deleted, "the child waits for records that are gone"),
        (waiting_for_what_nobody_can_read, records_before_a_gate_are_compacted_away, "not within"),
        (never_forgetting, another_owner_has_all_its_time, "do not wait for the new owner"),
        (dawdling, records_before_a_gate_are_deleted, "not within"),
        (remembering, an_owner_that_comes_back_has_all_its_time, "is counted from before the owner had it"),
    ],
)
def test_a_story_of_a_group_that_does_it_wrong_ends_badly(
    sabotage: Callable[[], AbstractContextManager[object]], story: Callable[[], None], why: str
) -> None:
    with sabotage(), pytest.raises(AssertionError, match=why):
        story()
