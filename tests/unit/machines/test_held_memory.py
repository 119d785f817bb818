"""Whose turn it is to hold memory, and which fetch must answer early, case by case and for any course of events."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from anabranch.machines.held_memory import (
    GATHERED_AT_A_TIME,
    GATHERED_SIZE_MIN,
    DecodedMemory,
    FetchMemory,
    FetchPart,
    GatheredMemory,
)


def test_decoded_requests_wait_for_room_in_turn_and_one_alone_has_room() -> None:
    memory = DecodedMemory(10)
    begun: list[str] = []
    for name, size in (("huge", 30), ("first", 6), ("second", 6), ("free", 0)):
        memory.take(size, lambda name=name: begun.append(name))
    assert begun == ["huge"] and (memory.held, memory.waiting) == (30, 3)
    memory.give(30)
    assert begun == ["huge", "first"], "nobody overtakes"
    memory.give(6)
    assert begun == ["huge", "first", "second", "free"] and (memory.held, memory.waiting) == (6, 0)
    memory.give(6)
    memory.give(0)
    assert memory.held == 0


class Reader:
    """A fetch that answers some time after its wait was ended."""

    def __init__(self, memory: FetchMemory) -> None:
        self.memory, self.part = memory, FetchPart()
        self.begun = self.over = False

    def take(self, size: int) -> Reader:
        def begin() -> None:
            self.part.size, self.begun = size, True

        self.memory.take(size, begin)
        return self

    def wait(self, size: int = 0) -> Reader:
        if size:
            self.begun = True
            self.memory.hold(self.part, size)
        self.memory.wait(self.part, self.end)
        return self

    def end(self) -> None:
        self.over = True

    def answer(self) -> None:
        self.memory.resume(self.part)
        self.memory.free(self.part)


def test_small_fetches_hold_what_they_wait_with_and_the_largest_ones_are_ended() -> None:
    memory = FetchMemory(100)
    old, large, new = Reader(memory).wait(20), Reader(memory).wait(70), Reader(memory).wait(21)
    assert (old.over, large.over, new.over) == (False, True, False) and memory.held == 111
    further = Reader(memory).wait(50)
    assert (old.over, further.over, new.over) == (False, False, False), "what is ended is not waited for twice"
    large.answer()
    assert memory.held == 91
    latest = Reader(memory).wait(18)
    assert (further.over, old.over, new.over, latest.over) == (True, False, False, False)
    for each in (old, new, further, latest):
        each.answer()
    assert (memory.held, memory.waiting, memory.ended) == (0, 0, 2)


def test_of_fetches_as_large_as_each_other_the_one_is_ended_that_has_waited_longest() -> None:
    memory = FetchMemory(100)
    readers = [Reader(memory).wait(30) for _ in range(5)]
    assert [each.over for each in readers] == [True, True, False, False, False]


def test_a_fetch_that_waits_its_turn_ends_waits_until_there_is_room_for_it() -> None:
    memory = FetchMemory(100)
    reading = Reader(memory).take(30)
    waiting = [Reader(memory).take(30).wait() for _ in range(2)]
    small = Reader(memory).wait(5)
    next_one = Reader(memory).take(60)
    assert reading.begun and not next_one.begun and memory.waiting == 1
    assert [each.over for each in (*waiting, small)] == [True, True, False]
    waiting[0].answer()
    assert not next_one.begun
    waiting[1].answer()
    assert next_one.begun and memory.held == 95


def test_no_wait_is_ended_in_vain_while_one_that_reads_holds_the_memory() -> None:
    memory = FetchMemory(100)
    reading, small = Reader(memory).take(90), Reader(memory).wait(5)
    following = Reader(memory).take(60)
    assert not small.over and not following.begun
    assert reading.wait().over and not small.over
    reading.answer()
    assert following.begun


def test_a_fetch_too_large_for_the_budget_waits_as_long_as_it_is_alone() -> None:
    memory = FetchMemory(100)
    huge = Reader(memory).take(300).wait()
    assert huge.begun and not huge.over
    Reader(memory).wait(1)
    assert huge.over


def test_a_fetch_that_begins_to_wait_while_another_waits_its_turn_is_ended_at_once() -> None:
    memory = FetchMemory(100)
    first = Reader(memory).take(80)
    second = Reader(memory).take(80)
    assert not second.begun
    assert first.wait().over
    memory.hold(first.part, 40)  # It has grown after its end.
    first.answer()
    assert second.begun and memory.held == 80


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "wait", "answer"]), st.integers(1, 150)), max_size=60))
def test_every_fetch_has_its_turn_when_those_that_were_ended_have_answered(events: list[tuple[str, int]]) -> None:
    memory = FetchMemory(100)
    readers: list[Reader] = []
    for what, size in events:
        reading = [it for it in readers if it.begun and it.part.size and it.part.end is None]
        if what == "take":
            readers.append(Reader(memory).take(size))
        elif what == "hold":
            readers.append(Reader(memory).wait(size))
        elif what == "wait" and reading and not reading[0].over:
            reading[0].wait()
        elif what == "answer" and reading:
            reading[0].answer()
    for _ in readers:
        for each in readers:
            if each.begun and each.part.size and each.part.end is None:
                each.answer()
    waits = [it for it in readers if it.part.end is not None]
    assert all(it.begun for it in readers) and memory.waiting == 0
    assert memory.held == sum(it.part.size for it in waits)
    assert memory.held <= 100 or len(waits) == 1


API, OTHER = 16, 35


class Gathering:
    """Answers of connections that are gathered, by name."""

    def __init__(self, size_max: int) -> None:
        self.memory = GatheredMemory(size_max)
        self.begun: dict[str, int] = {}

    def ask(self, name: str, holder: object = None, api_key: int = API) -> None:
        self.memory.take(holder or name, api_key, self._begin(name))

    def _begin(self, name: str) -> Callable[[int], None]:
        return lambda size: self.begun.update({name: size})

    def end(self, name: str, size: int | None = None, api_key: int = API) -> None:
        if size is not None:
            self.memory.learn(api_key, size)
        self.memory.give(self.begun.pop(name))


def test_a_long_answer_of_an_unknown_api_is_gathered_alone_and_others_by_what_they_took() -> None:
    size_max = 10 * GATHERED_SIZE_MIN
    gathering = Gathering(size_max)
    for name in ("a", "b", "c", "d", "e"):
        gathering.ask(name)
    assert gathering.begun == {"a": size_max} and gathering.memory.waiting == 4
    gathering.end("a", 4 * GATHERED_SIZE_MIN)
    assert gathering.begun == dict.fromkeys("bc", 4 * GATHERED_SIZE_MIN)
    assert gathering.memory.held == 8 * GATHERED_SIZE_MIN
    gathering.end("b", 100 * size_max)
    assert list(gathering.begun) == ["c"], "larger than all the room: alone"
    gathering.end("c")
    assert gathering.begun == {"d": size_max}
    gathering.end("d")
    gathering.end("e")
    assert (gathering.memory.held, gathering.memory.waiting, gathering.begun) == (0, 0, {})


def test_long_answers_that_have_become_small_are_gathered_a_few_at_a_time() -> None:
    gathering = Gathering(1 << 30)
    gathering.memory.learn(API, 1 << 29)
    for _ in range(200):
        gathering.memory.learn(API, 1)
    for number in range(GATHERED_AT_A_TIME + 3):
        gathering.ask(str(number))
    assert list(gathering.begun.values()) == [GATHERED_SIZE_MIN] * GATHERED_AT_A_TIME
    gathering.end("0")
    assert len(gathering.begun) == GATHERED_AT_A_TIME and gathering.memory.waiting == 2


def test_a_connection_that_asks_for_much_waits_behind_itself() -> None:
    gathering = Gathering(1)
    for number in range(50):
        gathering.ask(f"greedy {number}", "greedy")
    gathering.ask("modest")
    gathering.end("greedy 0")
    gathering.end("greedy 1")
    assert list(gathering.begun) == ["modest"]


def test_a_turn_that_is_given_back_at_once_is_the_next_ones() -> None:
    gathering = Gathering(1)
    gathering.ask("first")
    gathering.memory.take("gone", API, gathering.memory.give)
    gathering.ask("last")
    gathering.end("first")
    assert list(gathering.begun) == ["last"]


COUNT = 10_000


def test_thousands_that_are_not_wanted_any_more_give_their_turn_back_one_after_another() -> None:
    gathering, decoded = Gathering(1), DecodedMemory(1)
    begun: list[str] = []
    gathering.ask("first")
    decoded.take(1, lambda: begun.append("first"))
    for _ in range(COUNT):
        gathering.memory.take("gone", API, gathering.memory.give)
        decoded.take(1, lambda: decoded.give(1))
    gathering.ask("last")
    decoded.take(1, lambda: begun.append("last"))
    gathering.end("first")
    decoded.give(1)
    assert (list(gathering.begun), begun) == (["last"], ["first", "last"])
    gathering.end("last")
    assert gathering.memory.waiting == decoded.waiting == gathering.memory.held == 0
