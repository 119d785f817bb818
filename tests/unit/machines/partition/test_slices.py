"""What a member may hold of a partition without a commit, and how much of the book a claim looks at."""

from __future__ import annotations

from anabranch.machines.partition.slices import Claimant, Slice, Slices, SliceSettings


class Nothing:
    """A group that has committed nothing above the stable offset, and counts questions."""

    def __init__(self, stable: int = 0) -> None:
        self.stable = stable
        self.version = 1
        self.asked = 0

    def reaches(self, offset: int) -> int:
        self.asked += 1
        return max(self.stable, offset)

    def next_committed(self, offset: int) -> int | None:
        return None


class Book:
    """The slices of one partition, and members that number their claims."""

    def __init__(self, settings: SliceSettings | None = None) -> None:
        self.slices = Slices(SliceSettings() if settings is None else settings)
        self.progress = Nothing()
        self._sequences: dict[str, int] = {}

    def claim(self, member: str, limit: int, records_max: int = 500, *, log_start: int = 0) -> Slice | None:
        by = Claimant(member, 1, 1, self._sequences.get(member, 0))
        found = self.slices.claim(by, self.progress, limit, records_max, lambda name: True, 0, log_start)
        assert found is None or isinstance(found, Slice), found
        if found is not None:
            self._sequences[member] = by.sequence + 1
        return found


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
