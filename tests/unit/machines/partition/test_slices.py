"""What a member may hold of a partition without a commit, and how much of the book a claim looks at."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.machines.groups.individual import OffsetRanges
from anabranch.machines.partition.slices import (
    FREED_AT_A_TIME,
    PASSED_AT_A_TIME,
    SESSION_SIZE,
    SLICE_SIZE,
    Claimant,
    Slice,
    SliceRoom,
    Slices,
    SliceSettings,
)

MANY = 3_000
WORK_MAX = 1_500
"""Slices and ranges of one step: 3 ms."""


class Nothing:
    """A group that has committed nothing above the stable offset, and counts questions."""

    def __init__(self, stable: int = 0) -> None:
        self.stable = stable
        self.version = 1
        self.asked = 0

    def reaches(self, offset: int) -> int:
        self.asked += 1
        return max(self.stable, offset)

    def passes(self, offset: int) -> int:
        return self.reaches(offset)

    def next_passed(self, offset: int) -> int | None:
        return None


class Book:
    """The slices of one partition, and members that number their claims."""

    def __init__(self, settings: SliceSettings | None = None, room: SliceRoom | None = None) -> None:
        self.slices = Slices(SliceSettings() if settings is None else settings, room)
        self.gone: set[str] = set()
        self.now_ms = 0
        self.progress = Nothing()
        self._sequences: dict[str, int] = {}

    def claim(self, member: str, limit: int, records_max: int = 500, *, log_start: int = 0) -> Slice | None:
        by = Claimant(member, 1, 1, self._sequences.get(member, 0))
        found = self.slices.claim(by, self.progress, limit, records_max, self.is_live, self.now_ms, log_start)
        assert found is None or isinstance(found, Slice), found
        if found is not None:
            self._sequences[member] = by.sequence + 1
        return found

    def is_live(self, member: str) -> bool:
        return member not in self.gone

    def holders(self, member: str, *ranges: tuple[int, int]) -> list[Slice | None]:
        return list(self.slices.holders_of(member, ranges, self.is_live, self.now_ms))

    def holder(self, member: str) -> Slice | None:
        """Who else has anything."""
        (found,) = self.holders(member, (0, MANY))
        return found

    def fill(self, *members: str) -> None:
        """Have members hold many slices, of one record each, in turns."""
        for number in range(MANY):
            assert self.claim(members[number % len(members)], number + 1, 1) is not None

    def steps(self, limit: int) -> tuple[int, Slice | None]:
        """Claim until it is found out what is open; in how many steps."""
        for count in range(1, MANY):
            found = self.claim("next", limit, 1)
            assert self.slices.work <= WORK_MAX
            if found is not None or not self.slices.is_behind:
                return count, found
        raise AssertionError("it is never found out")


def test_records_that_come_one_by_one_are_handed_out_without_a_commit() -> None:
    book = Book()
    for end in range(1, 5_001):
        found = book.claim("a", end)
        assert found is not None and (found.start, found.end) == (end - 1, end - 1)


def test_a_member_at_its_bound_gets_more_once_some_of_it_is_committed() -> None:
    book = Book(SliceSettings(per_member_max=3, slices_max=5))
    for end in (1, 2, 3):
        assert book.claim("a", end, 1) is not None
    assert book.claim("a", 9) is None
    assert [book.claim("b", 9, 1) is not None for _ in range(3)] == [True, True, False], "of all members together"
    book.progress.stable = 2
    assert book.claim("a", 9, 1) is not None
    assert book.claim("b", 9, 1) is not None


def test_all_that_was_deleted_is_one_slice() -> None:
    book = Book()
    deleted, behind = book.claim("a", 6_000, 10, log_start=5_000), book.claim("a", 6_000, 10, log_start=5_000)
    assert deleted is not None and (deleted.start, deleted.end) == (0, 4_999)
    assert behind is not None and (behind.start, behind.end) == (5_000, 5_009)


def test_a_claim_does_not_look_at_all_that_is_held_behind_a_slice_that_was_free_and_is_taken() -> None:
    book = Book()
    first = book.claim("first", 10, 10)
    assert first is not None
    for number in range(2_000):
        assert book.claim(f"m{number % 100}", 20 + 10 * number, 10) is not None
    book.slices.end_session("first")
    again = book.claim("m0", 20_010, 10)
    assert again is not None and (again.start, again.end) == (0, 9)
    book.progress.asked = 0
    last = book.claim("m1", 20_020, 10)
    assert last is not None and last.start == 20_010
    assert book.progress.asked < 100, "a few of its own slices, and what may be open"


def test_what_members_that_are_gone_had_is_freed_some_at_a_time_and_is_nobodys_at_once() -> None:
    book = Book()
    book.fill("a", "b")
    book.gone = {"a", "b"}
    assert book.claim("c", MANY, 1) is None and book.slices.is_behind
    assert len(book.slices) == MANY - FREED_AT_A_TIME
    assert book.holder("d") is None
    book.gone = set()  # They come again, and have nothing.
    assert book.holder("d") is None
    left = next(it for it in book.slices.held() if it.member_id == "b")
    assert not book.slices.shrink(left, left.end, 1), "it ended before it was read"
    steps = 1
    while book.slices.sweep(book.is_live, 0):
        assert book.slices.work <= WORK_MAX
        steps += 1
    assert steps >= MANY // FREED_AT_A_TIME - 1 and not len(book.slices)
    found = book.steps(MANY)[1]
    assert found is not None and found.start == 0, "the lowest, when all are free"
    assert book.slices.offered_again == MANY


def test_what_was_held_for_too_long_is_freed_some_at_a_time_and_is_nobodys_at_once() -> None:
    book = Book()
    book.fill("a", "b")
    book.now_ms = SliceSettings().hold_ms
    assert book.holder("d") is None
    count = 1
    while book.slices.sweep(book.is_live, book.now_ms):
        assert book.slices.work <= WORK_MAX
        count += 1
    assert count >= MANY // FREED_AT_A_TIME and not len(book.slices)
    assert book.steps(MANY)[1] is not None


def test_a_session_that_begins_anew_frees_what_the_last_one_had_some_at_a_time() -> None:
    book = Book()
    book.fill("a")
    steps, again = 1, book.slices.claim(Claimant("a", 1, 2, 0), book.progress, MANY, 1, book.is_live, 0)
    assert again is None and len(book.slices) == MANY - FREED_AT_A_TIME
    assert book.holder("b") is None, "they are of the session that is over"
    while again is None and book.slices.is_behind:
        again = book.slices.claim(Claimant("a", 1, 2, 0), book.progress, MANY, 1, book.is_live, 0)
        assert book.slices.work <= WORK_MAX
        steps += 1
    assert isinstance(again, Slice) and again.start == 0 and steps >= MANY // FREED_AT_A_TIME
    assert book.holder("b") is again


def test_all_is_looked_for_anew_some_at_a_time() -> None:
    book = Book()
    book.fill("a", "b")
    book.progress.version += 1
    steps, found = book.steps(MANY)
    assert steps >= MANY // PASSED_AT_A_TIME and found is None
    book.slices.end_session("a")
    assert book.steps(MANY)[1] is not None


def test_all_books_have_one_budget() -> None:
    room = SliceRoom(size_max=2 * SESSION_SIZE + 5 * SLICE_SIZE)
    first, second = Book(room=room), Book(room=room)
    assert [first.claim("a", 9, 1) is not None for _ in range(3)] == [True] * 3
    assert [second.claim("b", 9, 1) is not None for _ in range(3)] == [True, True, False]
    assert second.claim("c", 9, 1) is None, "nor a session"
    assert not second.slices.is_behind, "there is nothing to be made again for"
    first.progress.stable = 2
    assert first.claim("a", 9, 1) is not None, "as some of what it had is committed"
    assert second.claim("b", 9, 1) is not None
    first.slices.clear()
    second.slices.end_session("b")
    assert room.size == 0


class Counted(dict[int, Slice]):
    """The slices of a book, which counts those that are looked at."""

    looks = 0

    def __getitem__(self, start: int) -> Slice:
        self.looks += 1
        return super().__getitem__(start)


class Unpassed(OffsetRanges):
    """The offsets of a book, of which none may be passed."""

    def starts_within(self, first: int, last: int) -> Iterator[int]:
        raise AssertionError("all of a member's slices are passed")


def test_commits_do_not_look_at_what_their_member_has_nor_twice_at_anything() -> None:
    book = Book()
    book.fill(*["a"] * 9, "b")
    book.gone = {"b"}
    book.slices._held = held = Counted(book.slices._held)
    assert book.holders("a", *[(0, MANY - 1 - number) for number in range(98)]) == [None] * 98
    assert held.looks <= 2 * MANY // 10, "b is gone, of which the book is yet to hear"


def test_a_commit_does_not_ask_of_a_thousand_members_whether_they_live() -> None:
    """Of 98 partitions that were named by one of 1,000 members this was a step of 19 ms."""
    book, asked = Book(), []
    for number in range(1_000):
        assert book.claim(f"m{number}", number + 1, 1) is not None

    def is_live(member: str) -> bool:
        asked.append(member)
        return True

    ranges = [(500, 500), (500, 501), (700, 700)]
    found = [it and it.member_id for it in book.slices.holders_of("m500", ranges, is_live, 0)]
    assert found == [None, "m501", "m700"] and asked == ["m501", "m700"]


def test_a_commit_beside_few_slices_of_others_does_not_pass_all_of_its_own() -> None:
    book = Book()
    book.fill(*["a"] * (MANY - 1), "b")
    book.slices._spans = Unpassed(book.slices._spans)
    found = book.holder("a")
    assert found is not None and found.member_id == "b"
