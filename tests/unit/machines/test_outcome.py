"""Drafts: what one decision gathers, and the outcome it gives."""

from __future__ import annotations

from anabranch.machines.outcome import CancelTimer, Draft, Outcome, Parked, ParkedReply, SetTimer


def test_a_draft_gives_everything_in_the_order_in_which_it_was_decided() -> None:
    draft: Draft[str] = Draft()
    draft.write("one", "two")
    draft.set_timer("a", 10)
    draft.perform("send")
    draft.answer(7, "yes")
    draft.write("three")
    draft.cancel_timer("b")
    draft.perform("send again", "publish")
    assert draft.outcome("reply") == Outcome(
        reply="reply",
        records=("one", "two", "three"),
        timers=(SetTimer("a", 10), CancelTimer("b")),
        answers=(ParkedReply(7, "yes"),),
        effects=("send", "send again", "publish"),
    )


def test_an_empty_draft_is_an_outcome_with_nothing_but_a_reply() -> None:
    empty: Draft[str] = Draft()
    assert empty.outcome(3) == Outcome(3)


def test_of_several_orders_for_one_timer_and_answers_to_one_ticket_the_last_counts() -> None:
    draft: Draft[str] = Draft()
    draft.set_timer("a", 10)
    draft.cancel_timer("a")
    draft.set_timer("b", 10)
    draft.set_timer("b", 20)
    draft.answer(7, "no")
    draft.answer(7, "yes")
    outcome = draft.outcome(None)
    assert outcome.timers == (CancelTimer("a"), SetTimer("b", 20))
    assert outcome.answers == (ParkedReply(7, "yes"),)


def test_the_answer_to_the_request_itself_is_its_reply_and_else_the_request_is_parked() -> None:
    draft: Draft[str] = Draft()
    draft.answer(7, "other")
    assert draft.outcome_for(8) == Outcome(Parked(8), answers=(ParkedReply(7, "other"),))
    draft.answer(8, "own")
    assert draft.outcome_for(8) == Outcome("own", answers=(ParkedReply(7, "other"),))


def test_records_are_written_under_the_producer_of_the_draft() -> None:
    draft: Draft[str] = Draft()
    draft.write("one")
    draft.producer = 5, 0
    assert draft.outcome(None) == Outcome(None, ("one",), producer=(5, 0))


def test_parts_of_a_decision_are_added_without_their_replies() -> None:
    part: Draft[str] = Draft()
    part.write("two")
    part.set_timer("a", 20)
    part.perform("publish")
    whole: Draft[str] = Draft()
    whole.write("one")
    whole.set_timer("a", 10)
    whole.add(part)
    whole.add(Outcome("dropped", ("three",), (CancelTimer("b"),), (ParkedReply(7, "yes"),), effects=("send",)))
    assert whole.outcome("reply") == Outcome(
        "reply",
        ("one", "two", "three"),
        (SetTimer("a", 20), CancelTimer("b")),
        (ParkedReply(7, "yes"),),
        effects=("publish", "send"),
    )
    part.write("later")
    assert whole.records == ["one", "two", "three"]
