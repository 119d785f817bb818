from __future__ import annotations

import asyncio
import os
import warnings
from contextlib import suppress
from threading import Thread
from time import sleep
from typing import Any

import numpy as np
import pytest

from anabranch.base.errors import ApiError
from anabranch.client.producer.delivery import DeliveryError
from anabranch.client.producer.outcome import News, Outcome, Receipt, RecordOutcome, TableOutcome
from anabranch.client.producer.rows import Fate, RecordMetadata
from anabranch.client.sync import Producer


def test_an_outcome_is_told_to_who_waits_and_who_asked_to_be_called() -> None:
    outcome: TableOutcome[int] = TableOutcome(News())
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
    outcome: TableOutcome[int] = TableOutcome(News())
    outcome.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        outcome.result()


def test_no_callback_is_lost_or_called_twice_when_the_outcome_comes_meanwhile() -> None:
    for _ in range(2_000):
        outcome: TableOutcome[int] = TableOutcome(News())
        called: list[Outcome[int]] = []
        thread = Thread(target=outcome.set_result, args=(1,))
        thread.start()
        outcome.add_done_callback(called.append)
        thread.join()
        assert called == [outcome]


def outcomes_of(receipt: Receipt, count: int) -> list[RecordOutcome]:
    receipt.count = count
    outcomes = [RecordOutcome() for _ in range(count)]
    for place, outcome in enumerate(outcomes):
        outcome.receipt, outcome.place = receipt, place
    return outcomes


def test_records_find_their_own_metadata_in_the_receipt_that_they_share() -> None:
    receipt = Receipt(News())
    outcomes = outcomes_of(receipt, 4)
    called: list[int] = []
    outcomes[1].add_done_callback(lambda outcome: called.append(outcome.result().offset))
    waiter = Thread(target=outcomes[2].result, args=(10,))
    waiter.start()
    receipt.delivered(np.array([1, 2]), Fate("t", 4, np.array([100, 101])), np.array([7, 8]))
    waiter.join(10)
    assert not waiter.is_alive() and called == [100]
    assert [outcome.done() for outcome in outcomes] == [False, True, True, False]
    with pytest.raises(TimeoutError):
        outcomes[0].result(0.01)
    receipt.delivered(np.array([3]), Fate("t", 5, -1), 99)
    receipt.failed(np.array([0]), ValueError("no"))
    assert outcomes[3].result() == ("t", 5, -1, 99), "without acks no offset is known"
    assert [outcome.result() for outcome in outcomes[1:3]] == [("t", 4, 100, 7), ("t", 4, 101, 8)]
    assert [outcome.exception() is None for outcome in outcomes] == [False, True, True, True]
    with pytest.raises(ValueError, match="no"):
        outcomes[0].result()


def test_no_callback_of_a_record_is_lost_or_called_twice_and_one_that_raises_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[Outcome[RecordMetadata]] = []
    for _ in range(500):
        receipt = Receipt(News())
        outcomes = outcomes_of(receipt, 2)
        outcomes[0].add_done_callback(lambda _: 1 / 0)
        thread = Thread(target=receipt.delivered, args=(np.arange(2), Fate("t", 0, np.arange(2)), 1))
        thread.start()
        outcomes[1].add_done_callback(called.append)
        thread.join()
        assert called == [outcomes[1]]
        called.clear()
    outcomes[1].add_done_callback(called.append)
    assert called == [outcomes[1]] and "a callback of an outcome raised an exception" in caplog.text


def test_what_are_no_headers_is_refused_at_once_and_stops_no_record_behind_it() -> None:
    with Producer("127.0.0.1:1", max_block_ms=100, delivery_timeout_ms=200, request_timeout_ms=100) as producer:
        with pytest.raises(TypeError, match="headers are pairs"):
            producer.send("t", b"v", headers=[1])  # type: ignore[list-item]
        assert isinstance(producer.send("t", b"v").exception(30), ApiError)
        with pytest.raises(DeliveryError):
            producer.flush()


def test_a_closed_producer_takes_no_records_and_keeps_none() -> None:
    producer = Producer("127.0.0.1:1", max_block_ms=100, delivery_timeout_ms=200, request_timeout_ms=100)
    before = producer.send("t", b"v")
    with pytest.raises(DeliveryError):
        producer.close()
    assert isinstance(before.exception(0), ApiError)
    for _ in range(3):
        with pytest.raises(ApiError, match="this client is closed"):
            producer.send("t", b"v")
    assert not producer._intake.tray.rows
    with pytest.raises(TypeError, match="a partition is an integer, not str"):
        producer.send("t", b"v", partition="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a timestamp is an integer of 64 bits"):
        producer.send("t", b"v", timestamp=1 << 63)


def test_a_producer_is_of_no_use_in_a_forked_process() -> None:
    with Producer("127.0.0.1:1", max_block_ms=100, delivery_timeout_ms=200, request_timeout_ms=100) as producer:
        before = producer.send("t", b"v")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            try:
                producer.send("t", b"v")
            except ApiError as error:
                os._exit(7 if "make one in each" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert isinstance(before.exception(30), ApiError)
        with pytest.raises(DeliveryError):
            producer.flush()


def test_a_callback_may_send_while_the_buffer_is_full() -> None:
    settings: dict[str, Any] = {
        "buffer_memory": 10,
        "max_block_ms": 300,
        "delivery_timeout_ms": 300,
        "request_timeout_ms": 100,
    }
    with Producer("127.0.0.1:1", **settings) as producer:
        sent = [producer.send("t", b"v")]
        while not producer._inner.is_full:
            sleep(0.001)

        async def called() -> None:
            sent.append(producer.send("t", b"w"))

        asyncio.run_coroutine_threadsafe(called(), producer._thread.loop).result(10)
        assert [isinstance(outcome.exception(30), ApiError) for outcome in sent] == [True, True]
        with pytest.raises(DeliveryError):
            producer.flush()


def test_a_send_that_raises_because_the_buffer_stays_full_has_sent_nothing() -> None:
    """Its record came all the same: twice, where the application tried again."""
    settings: dict[str, Any] = {
        "buffer_memory": 10,
        "max_block_ms": 300,
        "delivery_timeout_ms": 600_000,
        "request_timeout_ms": 100,
    }
    producer = Producer("127.0.0.1:1", **settings)

    async def fill() -> None:
        producer._inner._driver.batcher.state.buffered_size += 10

    producer._thread.run(fill())
    for _ in range(3):
        with pytest.raises(ApiError, match="the buffer of 10 bytes"):
            producer.send("t", b"v")
    thread = Thread(target=lambda: producer.send("t", b"w"))
    thread.start()

    async def empty() -> None:
        producer._inner._driver.batcher.state.buffered_size -= 10
        producer._inner._driver.pump()

    producer._thread.run(empty())
    thread.join()
    with pytest.raises(DeliveryError) as raised:
        producer.close(0.1)
    assert raised.value.record_count == 1


def test_a_record_sent_while_the_producer_closes_has_an_outcome_or_is_refused() -> None:
    for _ in range(5):
        producer = Producer("127.0.0.1:1", max_block_ms=50, delivery_timeout_ms=100, request_timeout_ms=50)
        outcomes: list[Outcome[RecordMetadata]] = []

        def sender(producer: Producer = producer, outcomes: list[Outcome[RecordMetadata]] = outcomes) -> None:
            with suppress(ApiError):
                while True:
                    outcomes.append(producer.send("t", b"v"))

        thread = Thread(target=sender)
        thread.start()
        while len(outcomes) < 100:
            sleep(0.001)
        with suppress(DeliveryError, ApiError):
            producer.close()
        thread.join(30)
        assert not thread.is_alive() and all(outcome.done() for outcome in outcomes)


def test_a_producer_that_closes_refuses_records_while_it_flushes_earlier_ones() -> None:
    producer = Producer("127.0.0.1:1", max_block_ms=2_000, delivery_timeout_ms=2_000, request_timeout_ms=100)
    before = producer.send("t", b"v")

    def close() -> None:
        with suppress(DeliveryError):
            producer.close()

    def send() -> None:
        while True:
            producer.send("t", b"w")
            sleep(0.01)

    thread = Thread(target=close)
    thread.start()
    with pytest.raises(ApiError, match="this client is closed"):
        send()
    assert not before.done() and thread.is_alive()
    thread.join(30)
    assert isinstance(before.exception(0), ApiError)
