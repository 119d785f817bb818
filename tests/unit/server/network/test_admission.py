"""What the listener decides about connections, case by case."""

from __future__ import annotations

from itertools import product

import pytest

from anabranch.base.limits import IN_FLIGHT_PER_CONNECTION_MAX
from anabranch.server.network.admission import Activity, Admission, AnswerMemory, Refusal, Verdict, may_begin

NOW = 1_000.0
ADMISSION = Admission(connections_max=2, idle_max_ms=60_000, stalled_max_ms=5_000)
RECENT, LONG_AGO = NOW - 1, NOW - 61


def test_connections_are_taken_up_to_the_maximum() -> None:
    assert [ADMISSION.refusal(number, number) for number in range(4)] == [None, None, Refusal.ALL, Refusal.ALL]
    assert Admission(connections_max=0, idle_max_ms=1, stalled_max_ms=1).refusal(0, 0) is Refusal.ALL


def test_the_last_tenth_is_for_addresses_that_have_few_connections() -> None:
    admission = Admission(connections_max=1_000, idle_max_ms=1, stalled_max_ms=1)
    assert admission.refusal(899, 899) is None
    assert admission.refusal(900, 900) is Refusal.RESERVED
    assert admission.refusal(900, 0) is None
    assert admission.refusal(999, 10) is None
    assert admission.refusal(999, 11) is Refusal.RESERVED
    assert admission.refusal(1_000, 0) is Refusal.ALL


def test_an_address_has_no_more_connections_than_the_limit_of_one() -> None:
    admission = Admission(connections_max=1_000, idle_max_ms=1, stalled_max_ms=1, per_address_max=2)
    assert admission.refusal(5, 1) is None
    assert admission.refusal(5, 2) is Refusal.ADDRESS


@pytest.mark.parametrize(
    ("activity", "contended", "verdict"),
    [
        (Activity(RECENT, None, 0, False), False, Verdict.KEEP),
        (Activity(LONG_AGO, None, 0, False), False, Verdict.IDLE),
        (Activity(LONG_AGO, None, 0, False), True, Verdict.IDLE),
        (Activity(LONG_AGO, None, 0, True), False, Verdict.KEEP),  # its request waits for its answer
        (Activity(LONG_AGO, LONG_AGO, 0, False), False, Verdict.SILENT),  # in the middle of a request
        (Activity(LONG_AGO, None, 9, True), False, Verdict.SILENT),  # in the middle of an answer
        (Activity(RECENT, LONG_AGO, 0, False), False, Verdict.KEEP),  # slow, but it disturbs no other connection
        (Activity(RECENT, LONG_AGO, 0, False), True, Verdict.STALLED),
        (Activity(LONG_AGO, LONG_AGO, 0, True), True, Verdict.STALLED),
        (Activity(RECENT, NOW - 4, 0, False), True, Verdict.KEEP),
    ],
)
def test_a_connection_is_judged(activity: Activity, contended: bool, verdict: Verdict) -> None:
    assert ADMISSION.judge(activity, NOW, contended=contended) is verdict


def test_every_connection_is_judged_and_one_that_moves_without_being_in_the_way_is_kept() -> None:
    for progress, held, unsent, busy, contended in product(
        (RECENT, LONG_AGO), (None, RECENT, LONG_AGO), (0, 1), (False, True), (False, True)
    ):
        verdict = ADMISSION.judge(Activity(progress, held, unsent, busy), NOW, contended=contended)
        assert isinstance(verdict, Verdict)
        if progress == RECENT and (held != LONG_AGO or not contended):
            assert verdict is Verdict.KEEP
        if verdict is Verdict.STALLED:
            assert contended


def test_a_request_begins_while_few_wait_and_the_peer_reads() -> None:
    assert may_begin(0, 0)
    assert may_begin(IN_FLIGHT_PER_CONNECTION_MAX - 1, 0)
    assert not may_begin(IN_FLIGHT_PER_CONNECTION_MAX, 0)
    assert not may_begin(0, 1)


def test_unread_answers_above_the_limit_cost_those_their_connection_that_have_long_held_more_than_a_share() -> None:
    answers = AnswerMemory(100)
    answers.note("a", 90)
    assert (answers.share, answers.surplus) == (None, None)
    answers.note("b", 20)
    assert (answers.held, answers.share, answers.surplus) == (110, 50, None)
    answers.note("b", 120)
    assert answers.surplus == "b"
    answers.note("b", 0)
    assert (answers.held, answers.share) == (90, None)
    admission = Admission(connections_max=1, idle_max_ms=10_000, stalled_max_ms=1_000)

    def judged(held: int, since: float, share: int | None) -> Verdict:
        activity = Activity(10.0, None, held, True, held, since)
        return admission.judge(activity, 10.0, contended=False, answers_max=share)

    assert judged(51, 8.9, 50) is Verdict.UNREAD
    assert judged(50, 8.9, 50) is judged(51, 9.1, 50) is judged(51, 8.9, None) is Verdict.KEEP
