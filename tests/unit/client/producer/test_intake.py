"""Records on their way from threads to the loop: taken exactly once, in the order of each thread."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from time import time
from typing import Any

import pytest

from anabranch.base.errors import ApiError
from anabranch.client.producer.intake import WIDTH, Intake, Row, Tray
from anabranch.client.producer.outcome import News, Receipt


@pytest.fixture
def short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def row(value: bytes = b"v") -> Row:
    return "t", None, value, time()


def send(intake: Intake, given: Row) -> tuple[Tray, int]:
    """As `Producer.send` does."""
    tray = intake.tray
    rows = tray.rows
    rows += given
    end = len(rows)
    if end > tray.limit or rows[-1] is not given[-1]:
        tray, end = intake.place(tray, given)
    return tray, end


def values(tray: Tray) -> list[bytes]:
    return [value for _, _, found, _, _ in tray.by_topic() for value in found]


def test_every_record_of_every_thread_is_taken_once_in_order_and_knows_its_place(short_turns: None) -> None:
    woken: SimpleQueue[bool] = SimpleQueue()
    intake = Intake(lambda: woken.put(True), News())
    senders, trays = 4, 60
    taken: list[Tray] = []
    places: list[list[tuple[Receipt, int]]] = [[] for _ in range(senders)]

    def sender(number: int) -> None:
        for count in itertools.count():
            if len(taken) >= trays:
                break
            tray, end = send(intake, row(b"%d %d" % (number, count)))
            places[number].append((tray.receipt, end // WIDTH - 1))
        woken.put(False)

    threads = [Thread(target=sender, args=(number,)) for number in range(senders)]
    for thread in threads:
        thread.start()
    left = senders
    while left or not woken.empty():
        left -= not woken.get(timeout=30)
        tray = intake.take()
        if tray is not None:
            taken.append(tray)
    assert not intake.tray.rows, "the first record of every tray has woken the loop"
    found = [value.split() for tray in taken for value in values(tray)]
    for number in range(senders):
        counts = [int(count) for sent, count in found if int(sent) == number]
        assert counts == list(range(len(places[number])))
    at = {id(tray.receipt): values(tray) for tray in taken}
    for number in range(senders):
        assert [at[id(receipt)][place] for receipt, place in places[number]] == [
            b"%d %d" % (number, count) for count in range(len(places[number]))
        ]


def test_a_record_that_comes_after_its_tray_was_taken_goes_into_the_next_one() -> None:
    intake = Intake(lambda: None, News())
    old, early, late = intake.tray, row(b"early"), row(b"late")
    send(intake, early)
    assert old.limit
    assert intake.take() is old and values(old) == [b"early"]
    assert not old.limit, "so its sender looks for a record that comes now"
    old.rows += late
    assert intake.place(old, early) == (old, WIDTH)
    tray, end = intake.place(old, late)
    assert tray is intake.tray and tray is not old and end == WIDTH
    assert values(old) == [b"early"] and intake.take() is tray and values(tray) == [b"late"]
    assert intake.take() is None


def test_a_place_is_found_among_records_of_other_threads() -> None:
    intake = Intake(lambda: None, News())
    given = [row(b"%d" % number) for number in range(5)]
    for one in given:
        intake.tray.rows += one
    assert [intake.place(intake.tray, one)[1] for one in given] == [WIDTH * (number + 1) for number in range(5)]


def test_the_first_record_of_each_tray_wakes_the_loop_and_the_limit_is_that_of_the_intake() -> None:
    woken: list[int] = []
    intake = Intake(lambda: woken.append(1), News())
    for _ in range(2):
        for _ in range(3):
            send(intake, row())
        assert intake.tray.limit == intake.limit
        assert intake.take() is not None and intake.tray.limit == 0
    assert len(woken) == 2


def test_a_sealed_intake_hands_over_what_came_before_and_refuses_the_rest() -> None:
    intake = Intake(lambda: None, News())
    before = row(b"before")
    tray = intake.tray
    send(intake, before)
    intake.seal()
    intake.seal()
    assert intake.place(tray, before) == (tray, WIDTH)
    for _ in range(3):
        with pytest.raises(ApiError, match="this client is closed"):
            send(intake, row())
        assert not intake.tray.rows
    late: Any = row(b"late")
    tray.rows += late
    with pytest.raises(ApiError):
        intake.place(tray, late)
    assert intake.take() is tray and values(tray) == [b"before"]
    assert intake.take() is None


def test_records_of_several_topics_keep_their_order_and_places() -> None:
    intake = Intake(lambda: None, News())
    for number in range(6):
        send(intake, ("ab"[number % 2], b"k%d" % number, None, time()))
    tray = intake.take()
    assert tray is not None and tray.receipt.count == 6
    found = {topic: (keys, places.tolist()) for topic, keys, _, _, places in tray.by_topic()}
    assert found == {"a": ([b"k0", b"k2", b"k4"], [0, 2, 4]), "b": ([b"k1", b"k3", b"k5"], [1, 3, 5])}
