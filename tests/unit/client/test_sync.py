from __future__ import annotations

from threading import Thread

import pytest

from anabranch.base.errors import ApiError
from anabranch.client.producer.delivery import DeliveryError
from anabranch.client.producer.outcome import DeliveredRecords, News, Outcome, settle
from anabranch.client.producer.rows import Outgoing, RecordMetadata
from anabranch.client.sync import Producer


def test_an_outcome_is_told_to_who_waits_and_who_asked_to_be_called() -> None:
    outcome: Outcome[int] = Outcome(News())
    called: list[Outcome[int]] = []
    outcome.add_done_callback(called.append)
    with pytest.raises(TimeoutError):
        outcome.result(0.01)
    thread = Thread(target=outcome.set_result, args=(7,))
    thread.start()
    assert outcome.result(10) == 7
    thread.join()
    outcome.add_done_callback(called.append)
    assert called == [outcome, outcome]


def test_an_error_is_raised_for_who_waits() -> None:
    outcome: Outcome[int] = Outcome(News())
    outcome.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        outcome.result()


def test_no_callback_is_lost_or_called_twice_when_the_outcome_comes_meanwhile() -> None:
    for _ in range(2_000):
        outcome: Outcome[int] = Outcome(News())
        called: list[Outcome[int]] = []
        thread = Thread(target=outcome.set_result, args=(1,))
        thread.start()
        outcome.add_done_callback(called.append)
        thread.join()
        assert called == [outcome]


def test_the_records_of_a_batch_find_their_own_metadata_in_what_they_share() -> None:
    news = News()
    outcomes: list[Outcome[RecordMetadata]] = [Outcome(news) for _ in range(3)]
    called: list[int] = []
    outcomes[1].add_done_callback(lambda outcome: called.append(outcome.result().offset))
    records: list[Outgoing] = [("t", None, b"v", 7 + n, (), None, outcome, 0) for n, outcome in enumerate(outcomes)]
    waiter = Thread(target=outcomes[2].result, args=(10,))
    waiter.start()
    settle(records, DeliveredRecords("t", 4, 100, [record[3] for record in records]))
    waiter.join(10)
    assert not waiter.is_alive() and called == [101]
    assert [outcome.result() for outcome in outcomes] == [("t", 4, 100 + n, 7 + n) for n in range(3)]
    settle(records, DeliveredRecords("t", 4, -1, 99))
    assert [outcome.result() for outcome in outcomes] == [("t", 4, -1, 99)] * 3, "without acks no offset is known"


def test_what_are_no_headers_is_refused_at_once_and_stops_no_record_behind_it() -> None:
    with Producer("127.0.0.1:1", max_block_ms=100, delivery_timeout_ms=200, request_timeout_ms=100) as producer:
        with pytest.raises(TypeError, match="headers are pairs"):
            producer.send("t", b"v", headers=[1])  # type: ignore[list-item]
        assert isinstance(producer.send("t", b"v").exception(30), ApiError)
        with pytest.raises(DeliveryError):
            producer.flush()
