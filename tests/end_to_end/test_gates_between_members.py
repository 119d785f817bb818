"""Gates of our members as their applications see them: what opens one, what must not, and what closes it again.

Applications commit when the test says so; so each test knows which record may be handed out at which moment. A gate
that has to open soon is waited for less long than the poll interval, after which every gate opens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.applications import QUICK, Workers, stage
from tests.support.broker import BrokerProcess

SOON_S = 6.0
"""A tenth of the applications' poll interval."""
LONG_MS = 600_000
QUESTIONS = 'kafka_network_requestmetrics_requests_total{request="ConsumerGroupPosition"}'


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_what_another_member_has_not_committed_opens_no_gate(
    shared: BrokerProcess, workers: Workers, protocol: str
) -> None:
    """The member of the parent is asked for its position, and has committed nothing of what it was handed."""
    with stage(shared.address, f"told-{protocol}", 1, workers) as it:
        group = it.group(members=2, commit="told", protocol=protocol)
        it.until_all_owned()
        it.load.send(10)
        it.until(lambda: group.handed_from[0] >= 40, "the parent is not read")
        it.resize(2)
        it.load.send(5)
        if protocol == "classic":
            assert group.owner(1) is not group.owner(0)
        it.keeps(lambda: not group.handed_from[1], "a record was handed out before the one before it was committed")
        for member in group.members:
            member.commit_on()
        it.finish(SOON_S)
        it.check_that_it_tested()


def test_a_gate_that_opened_by_time_closes_when_the_position_before_it_moves(
    shared: BrokerProcess, workers: Workers
) -> None:
    """Nothing is remembered: what the group has left to read in the parent is waited for again."""
    with stage(shared.address, "lifted", 1, workers) as it:
        group = it.group(members=2, commit="told", poll_interval_ms=2_000, patient=True)
        it.until_all_owned()
        it.load.send(10)
        it.until(lambda: group.handed_from[0] >= 40, "the parent is not read")
        it.resize(2)
        it.load.send(1)
        it.until(lambda: group.handed_from[1], "the gate does not open by time")
        opened = group.handed_from[1]
        group.owner(0).commit({0: 20})
        it.until(lambda: group.committed.get(0) == 20, "the parent is not committed")
        it.keeps(lambda: True, "", 0.3)
        it.load.send(2)
        it.keeps(lambda: group.handed_from[1] == opened, "the gate is open although the parent is read on")
        for member in group.members:
            member.commit_on()
        it.finish(SOON_S)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_that_never_commits_passes_gates_that_wait_for_one_another(
    shared: BrokerProcess, workers: Workers, protocol: str
) -> None:
    """It owns what its own gates wait on, and the last of them waits for records behind the others."""
    with stage(shared.address, f"never-{protocol}", 1, workers) as it:
        group = it.group(members=1, commit="told", poll_interval_ms=1_000, patient=True, protocol=protocol)
        it.until_all_owned()
        it.load.send(5)
        for count in (2, 1, 2, 1):
            it.resize(count)
            it.load.send(3)
        it.finish(60.0)
        assert not group.committed


@pytest.mark.parametrize("commit", ["told", "auto"])
def test_what_a_gate_waits_for_is_flushed_and_committed_at_once(
    shared: BrokerProcess, workers: Workers, commit: str
) -> None:
    """An application that commits every n-th record, or every ten minutes, and has less when the topic is resized."""
    with stage(shared.address, f"early-{commit}", 1, workers) as it:
        group = it.group(members=2, commit=commit, commit_interval_ms=LONG_MS, flushes=commit == "told")
        it.until_all_owned()
        it.load.send(15)
        it.until(lambda: group.handed_from[0] >= 60, "the parent is not read")
        it.resize(2)
        it.load.send(5)
        it.finish(SOON_S)
        it.check_that_it_tested(closed=False)


def test_after_a_restart_of_the_coordinator_a_member_reports_its_position_again(
    tmp_path: Path, own_workers: Workers
) -> None:
    """A group that reads from the end has committed nothing in the parent: only its member knows where it begins.

    The short session has the coordinator answer the question that holds the report: the member knows it to be taken.
    """
    broker = BrokerProcess(tmp_path / "data", **{**QUICK, "group.consumer.session.timeout.ms": 2_000}).start()
    broker.settings["listeners"] = broker.address
    try:
        with stage(broker.address, "restarted", 1, own_workers) as it:
            it.load.send(10, name="history")
            group = it.group(commit="told", reset="latest")
            it.until_all_owned()
            group.since = dict(it.load.sent)
            it.resize(2)
            it.until_owned(group, [1])
            asked = broker.metrics()[QUESTIONS]
            it.until(lambda: broker.metrics()[QUESTIONS] > asked + 2, "no question is answered")
            broker.kill()
            broker.start()
            it.resize(4)
            it.until(lambda: group.owners(2) and group.owners(3), "a gate of the second resize does not open", SOON_S)
            it.load.send(5)
            group.members[0].commit_on()
            it.finish(SOON_S)
    finally:
        broker.kill()


def test_a_classic_member_learns_of_a_rebalance_from_its_parked_question(
    shared: BrokerProcess, workers: Workers
) -> None:
    with stage(shared.address, "rebalanced", 1, workers) as it:
        group = it.group(protocol="classic", session_ms=60_000, heartbeat_ms=30_000)
        it.until_owned(group, [0])
        it.load.send(5)
        it.resize(2)
        it.load.send(5)
        it.until_owned(group, [0, 1])
        it.until(lambda: group.handed_from[1], "nothing is read")
        second = group.join()
        it.until(lambda: second.owned, "the first member does not hear of the second one", SOON_S)
        it.finish()


def test_a_member_that_has_more_to_ask_does_not_wait_for_its_parked_question(
    shared: BrokerProcess, workers: Workers
) -> None:
    """Offsets that a transaction commits are known to the coordinator alone; its member asks once it has read all."""
    with stage(shared.address, "asked-twice", 1, workers) as it:
        group = it.group(protocol="classic", session_ms=60_000, transactional=True, records_max=10, delay_ms=10)
        it.until_owned(group, [0])
        it.load.send(5)
        it.resize(2)
        it.load.send(5)
        it.until(lambda: group.handed_from[1], "the gate of the first resize does not open")
        it.load.send(20)
        it.resize(4)
        it.load.send(5)
        it.finish(SOON_S)
        it.check_that_it_tested()
