"""What a member reports and asks: the three conditions, flushes before reports, and gates that open by time."""

from __future__ import annotations

from dataclasses import replace

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching.gating import Standing
from anabranch.machines.clients.positions import NOTHING, Answer, Lift, PositionReports, Question
from anabranch.machines.lineage import UNKNOWN_END

P0, P1, P2 = (TopicPartition("t", number) for number in range(3))


class Member:
    """A member that owns partitions, each with a standing."""

    def __init__(self, *, auto_commit: bool = True, **standings: Standing) -> None:
        self.reports = PositionReports(auto_commit=auto_commit)
        self.standings = {TopicPartition("t", int(name[1:])): standing for name, standing in standings.items()}
        self.needs: dict[TopicPartition, int] = {}
        self.known: dict[TopicPartition, int] = {}
        """As the fetcher has it."""

    def due(self) -> tuple[TopicPartition, ...]:
        return self.reports.flush_due(self.needs, self.standings.get)

    def question(self) -> Question:
        return self.reports.question(self.needs, self.standings.get, self.known.get)

    def hear(self, *answers: Answer) -> Question:
        """Ask, have the question answered, and return it."""
        question = self.question()
        self.news = self.reports.answered(question, answers)
        self.known |= self.news.told
        return question


def at(
    position: int,
    progress: int | None = None,
    flushed: int | None = None,
    high: int = 100,
    ends: tuple[int, ...] = (10,),
) -> Standing:
    read = position if progress is None else progress
    return Standing(position, read, read if flushed is None else flushed, high, ends)


WANTED = Answer(P0, need_position=True)


def test_nothing_is_reported_that_nobody_wants_and_nothing_asked_that_no_gate_waits_on() -> None:
    member = Member(p0=at(7, progress=3))
    assert member.question() == Question() and member.due() == ()


def test_a_wanted_partition_is_reported_once_at_first_and_again_with_every_new_connection() -> None:
    member = Member(p0=at(4))
    member.hear(WANTED)
    assert member.hear().reports == {P0: 4}
    assert member.question().reports == {P0: NOTHING}
    member.reports.restart()
    assert member.question().reports == {P0: 4}


def test_a_wanted_partition_that_is_not_taken_over_yet_is_listed() -> None:
    """Otherwise the coordinator tells at once that it is wanted, ten times a second while nobody polls."""
    member = Member()
    member.hear(WANTED)
    assert member.question().reports == {P0: NOTHING}


def test_a_position_is_reported_when_it_grew_and_equals_the_high_watermark() -> None:
    member = Member(p0=at(4))
    member.hear(WANTED)
    member.hear()
    member.standings[P0] = at(8, high=9)
    assert member.question().reports == {P0: NOTHING}
    member.standings[P0] = at(9, high=9)
    assert member.question().reports == {P0: 9}


def test_a_position_is_reported_when_it_passed_the_end_of_a_segment() -> None:
    member = Member(p0=at(4))
    member.hear(WANTED)
    member.hear()
    member.standings[P0] = at(9)
    assert member.question().reports == {P0: NOTHING}
    member.standings[P0] = at(12)
    assert member.question().reports == {P0: 12}


def test_a_position_behind_all_ends_is_the_last_report_until_the_coordinator_wants_more() -> None:
    member = Member(p0=at(12))
    member.hear(WANTED)
    member.hear()
    assert member.question().reports == {}
    member.hear(WANTED)
    assert not member.hear().reports[P0] >= 0, "it was reported: the coordinator waits for a later position"
    member.standings[P0] = at(25, ends=(10, 20))
    assert member.question().reports == {P0: 25}


def test_where_no_layout_is_known_to_have_ended_a_report_is_not_the_last() -> None:
    member = Member(p0=at(12, ends=()))
    member.hear(WANTED)
    member.hear()
    assert member.question().reports == {P0: NOTHING}


def test_what_is_not_committed_is_not_reported_and_a_commit_is_due_by_the_same_conditions() -> None:
    member = Member(p0=at(4))
    member.hear(WANTED)
    member.hear()
    member.standings[P0] = at(9, progress=4)
    assert member.due() == () and member.question().reports == {P0: NOTHING}
    for standing in (at(12, progress=4), at(9, progress=4, high=9)):
        member.standings[P0] = standing
        assert member.due() == (P0,) and member.question().reports == {P0: NOTHING}


def test_a_commit_that_came_without_a_flush_is_not_reported_before_one() -> None:
    for auto_commit in (True, False):
        member = Member(auto_commit=auto_commit, p0=at(12, progress=12, flushed=3))
        member.hear(WANTED)
        assert member.question().reports == {P0: NOTHING} and member.due() == (P0,)
        member.standings[P0] = at(12, progress=12, flushed=12)
        assert member.question().reports == {P0: 12} and member.due() == ()


def test_with_commits_by_hand_a_flush_is_due_once_and_the_commit_is_the_applications() -> None:
    member = Member(auto_commit=False, p0=at(12, progress=4, flushed=4))
    member.hear(WANTED)
    member.hear()
    assert member.due() == (P0,)
    member.standings[P0] = at(12, progress=4, flushed=12)
    assert member.due() == () and member.question().reports == {P0: NOTHING}
    member.standings[P0] = at(12, progress=12, flushed=12)
    assert member.question().reports == {P0: 12}


def test_what_a_gate_of_its_own_waits_on_is_due_once_the_application_has_all_of_it() -> None:
    for auto_commit in (True, False):
        member = Member(auto_commit=auto_commit, p0=at(9, progress=4))
        member.needs = {P0: 10}
        assert member.due() == ()
        member.standings[P0] = at(10, progress=4)
        assert member.due() == (P0,)
        member.standings[P0] = at(10, progress=10)
        assert member.due() == ()


def test_other_members_partitions_are_asked_for_until_they_are_read() -> None:
    member = Member(p1=at(0))
    member.needs = {P0: 10}
    assert member.hear(Answer(P0, need_position=False, position=4)).asks == {P0: NOTHING}
    assert member.news.told == {P0: 4} and member.news.is_new
    assert member.hear(Answer(P0, need_position=False, position=4)).asks == {P0: 4}
    assert not member.news.is_new
    member.needs = {}
    assert member.question().asks == {}


def test_what_the_fetcher_has_forgotten_is_asked_for_again() -> None:
    """All partitions of a topic were revoked, and some granted again: the coordinator must tell the same once more."""
    member = Member(p1=at(0))
    member.needs = {P0: 10}
    member.hear(Answer(P0, need_position=False, position=10))
    member.known.clear()
    assert member.hear(Answer(P0, need_position=False, position=10)).asks == {P0: NOTHING}
    assert member.news.told == {P0: 10} and member.news.is_new
    assert member.question().asks == {P0: 10}


def test_an_answer_that_repeats_what_the_question_knew_is_told_to_a_fetcher_that_has_forgotten_it_meanwhile() -> None:
    member = Member(p1=at(0))
    member.needs, member.known = {P0: 10}, {P0: 4}
    question = member.question()
    member.known.clear()
    news = member.reports.answered(question, [Answer(P0, need_position=False, position=4)])
    assert news.told == {P0: 4} and not news.is_new


def test_the_first_question_on_a_new_connection_says_of_no_position_that_it_is_known() -> None:
    """The coordinator may count on an answer that was lost."""
    member = Member(p1=at(0))
    member.needs, member.known = {P0: 10}, {P0: 4}
    member.reports.restart()
    assert member.question().asks == {P0: NOTHING}, "not sent yet"
    assert member.hear().asks == {P0: NOTHING}
    assert member.question().asks == {P0: 4}


def test_a_partition_of_its_own_is_asked_for_where_commits_are_made_by_hand() -> None:
    for auto_commit, position, asked in ((True, 10, False), (False, 9, False), (False, 10, True)):
        member = Member(auto_commit=auto_commit, p0=at(position, progress=4))
        member.needs = {P0: 10}
        assert (P0 in member.question().asks) is asked


def test_a_gate_that_opens_by_time_is_lifted_up_to_what_it_needs_and_as_long_as_the_coordinator_says_so() -> None:
    member = Member()
    member.needs = {P0: 10}
    member.hear(Answer(P0, need_position=False, position=4, overdue=True))
    assert member.news.lifted == {P0: Lift(10)}
    member.needs = {P0: 20}
    member.hear(Answer(P0, need_position=False, position=4))
    assert member.news.lifted == {P0: None}


def test_a_gate_that_opens_by_time_is_lifted_up_to_where_the_coordinator_says() -> None:
    for need in (10, UNKNOWN_END):
        member = Member()
        member.needs = {P0: need}
        member.hear(Answer(P0, need_position=False, position=4, overdue=True, overdue_to=7))
        assert member.news.lifted == {P0: Lift(7, is_bound=True)}


def test_a_gate_on_a_log_that_cannot_be_opened_does_not_open_by_time() -> None:
    member = Member()
    member.needs = {P0: UNKNOWN_END}
    member.hear(Answer(P0, need_position=False, position=4, overdue=True))
    assert member.news.lifted == {P0: None}


def test_only_more_asks_less_knowledge_and_new_reports_are_worth_another_question() -> None:
    ask, less, report = Question({P0: 1, P1: 2}), Question({P0: 5}), Question({P0: 1, P1: 2}, reports={P2: 7})
    assert not less.adds_to(ask) and ask.adds_to(less) and report.adds_to(ask)
    assert Question({P0: 1, P1: NOTHING}).adds_to(ask), "the coordinator is not to think that it is known"
    assert not Question(reports={P2: NOTHING}).adds_to(Question()) and not report.adds_to(report)


def test_revoked_partitions_are_forgotten() -> None:
    member = Member(p0=at(4))
    member.hear(WANTED)
    member.hear()
    member.reports.drop([P0])
    assert member.question() == Question()
    member.hear(WANTED)
    assert member.question().reports == {P0: 4}, "another life of the partition: it was not reported yet"


def test_a_partition_that_the_coordinator_does_not_know_calls_for_new_metadata() -> None:
    member = Member()
    member.needs = {P0: 10, P1: 10}
    member.hear(Answer(P0, need_position=False, position=3), Answer(P1, need_position=False))
    assert member.news.missing == {P1} and member.news.told == {P0: 3}
    member.hear(WANTED)
    assert not member.news.missing


def test_what_is_flushed_is_reported_where_the_application_commits_by_hand() -> None:
    """By the same conditions as a position, and none of it is one."""
    member = Member(auto_commit=False, p0=at(7, progress=1, flushed=7))
    assert member.hear(WANTED).flushed == {}
    asked = member.hear()
    assert (asked.reports, asked.flushed) == ({P0: 1}, {P0: 7})
    asked = member.question()
    assert (asked.reports, asked.flushed) == ({P0: NOTHING}, {}) and not asked.adds_to(Question())
    member.standings[P0] = at(12, progress=1, flushed=9)
    assert member.question().flushed == {}, "it has passed no end, and is not at that of the log"
    member.standings[P0] = at(12, progress=1, flushed=12)
    asked = member.question()
    assert (asked.reports, asked.flushed) == ({P0: NOTHING}, {P0: 12}) and asked.adds_to(Question())
    member.hear()
    member.reports.restart()
    assert member.question().flushed == {P0: 12}, "the coordinator may be another one"
    member.needs = {P0: 12, P1: 3}
    asked = member.question()
    assert asked.asks.keys() == {P0, P1} and asked.flushed == {P0: 12}, "it is asked for: what is told of it is not all"


def test_what_is_flushed_is_not_reported_where_a_commit_follows_or_others_have_other_keys() -> None:
    member = Member(p0=at(7, progress=1, flushed=7))
    member.hear(WANTED)
    assert member.question().flushed == {}
    member = Member(auto_commit=False, p0=replace(at(7, progress=1, flushed=7), is_shared=True))
    member.hear(WANTED)
    assert member.question().flushed == {}


def test_an_application_that_keeps_up_tells_once_that_it_has_flushed_all_ended_segments() -> None:
    """No gate waits for more; before, each poll at the end of the log asked another question."""
    member = Member(auto_commit=False, p0=at(10, progress=2, high=10))
    member.standings[P0] = at(10, progress=2, flushed=10, high=10)
    member.hear(WANTED)
    assert member.hear().flushed == {P0: 10}
    for offset in range(11, 20):
        member.standings[P0] = at(offset, progress=2, flushed=offset, high=offset)
        assert not member.question().adds_to(Question({}, {}, {P0: NOTHING}))
    member.standings[P0] = at(20, progress=2, flushed=20, high=20, ends=(10, 20))
    assert member.question().flushed == {P0: 20}


def test_an_application_that_goes_back_takes_back_what_it_has_flushed() -> None:
    member = Member(auto_commit=False, p0=at(10, progress=2, flushed=10))
    member.hear(WANTED)
    assert member.hear().flushed == {P0: 10}
    member.standings[P0] = at(3, progress=2, flushed=3)
    asked = member.hear()
    assert asked.flushed == {P0: 3} and asked.adds_to(Question(flushed={P0: 10}))
    assert member.question().flushed == {}
    member.standings[P0] = at(10, progress=2, flushed=10)
    assert member.question().flushed == {P0: 10}


def test_what_is_flushed_is_told_again_under_each_epoch_and_not_before_the_position_is_known() -> None:
    member = Member(auto_commit=False, p0=Standing(None, None, 0, 100, (10,)))
    member.reports.begin_epoch(1)
    member.hear(WANTED)
    assert member.hear().flushed == {}
    member.standings[P0] = at(10, progress=2, flushed=10)
    asked = member.hear()
    assert asked.flushed == {P0: 10}
    member.reports.begin_epoch(1)
    assert member.question().flushed == {}
    member.reports.begin_epoch(2)
    member.reports.answered(asked, [])
    assert member.question().flushed == {P0: 10}, "the answer is to what was said under the epoch before"
