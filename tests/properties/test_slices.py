"""The slices of a partition against a plain model: who was handed which offset, and what is committed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.individual import OffsetRanges
from anabranch.machines.partition import slices
from anabranch.machines.partition.slices import Claimant, Refused, Slice, Slices, SliceSettings

SETTINGS = SliceSettings(hold_ms=60, records_max=7, per_member_max=4, slices_max=11, size_max=60, members_max=5)
MEMBERS = ["a", "b", "c", "d"]
STEPS = 300


class Committed:
    """What the group has committed, as a set of offsets; and the same as the coordinator has it."""

    def __init__(self) -> None:
        self.offsets: set[int] = set()
        self.in_transactions: set[int] = set()
        self.stable = 0
        self.version = 0
        self._ranges = OffsetRanges()

    def add(self, first: int, last: int) -> None:
        self.offsets.update(range(first, last + 1))
        merge = self._ranges.merged([(first, last)])
        for start in merge.removed:
            self._ranges.remove(start)
        for start, end in merge.put:
            self._ranges.put(start, end)
        self.stable = self._ranges.reaches(self.stable)

    def lose(self, chance: Random) -> None:
        kept = [it for it in sorted(self.offsets) if chance.random() < 0.5]
        self.offsets, self.stable, self._ranges = set(), 0, OffsetRanges()
        for offset in kept:
            self.add(offset, offset)
        self.version += 1

    def reaches(self, offset: int) -> int:
        return max(self.stable, self._ranges.reaches(offset))

    def passes(self, offset: int) -> int:
        at = self.reaches(offset)
        while at in self.in_transactions:
            at += 1
        return at

    def next_passed(self, offset: int) -> int | None:
        found = self._ranges.after(offset)
        starts = [it for it in self.in_transactions if it > offset]
        if found is not None:
            starts.append(found[0])
        return min(starts, default=None)


class World:
    """A leader's book, and members that claim, commit, die, repeat themselves and come too late."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.slices = Slices(SETTINGS)
        self.committed = Committed()
        self.now_ms = 0
        self.end = 30
        self.log_start = 0
        self.epoch = dict.fromkeys(MEMBERS, 1)
        self.live = set(MEMBERS)
        self.session = dict.fromkeys(MEMBERS, 1)
        self.sequence = dict.fromkeys(MEMBERS, 0)
        self.has: dict[str, dict[int, int]] = {member: {} for member in MEMBERS}
        """The offsets that each member has in hand, as far as it counts, with the time when they are free again."""
        self.transactions: list[tuple[int, int]] = []
        """What open transactions have committed."""

    def expire(self) -> None:
        for member in MEMBERS:
            for offset, due in list(self.has[member].items()):
                if due <= self.now_ms or member not in self.live:
                    del self.has[member][offset]

    def open(self, limit: int) -> list[int]:
        held = {offset for member in MEMBERS for offset in self.has[member]}
        passed = self.committed.offsets | self.committed.in_transactions
        return [it for it in range(limit) if it not in passed and it not in held]

    def claim(self, member: str, records_max: int, limit: int, sequence: int | None = None) -> Slice | Refused | None:
        number = self.sequence[member] if sequence is None else sequence
        by = Claimant(member, self.epoch[member], self.session[member], number)
        live = self.live.__contains__
        while True:
            found = self.slices.claim(by, self.committed, limit, records_max, live, self.now_ms, self.log_start)
            if found is not None or not self.slices.is_behind:
                return found

    def sweep(self) -> None:
        while self.slices.sweep(self.live.__contains__, self.now_ms):
            pass

    def step_claim(self) -> None:
        member = self.chance.choice(sorted(self.live))
        limit = self.chance.randint(max(0, self.end - 5), self.end)
        self.expire()
        opened = self.open(limit)
        if self.sequence[member] == 0:
            for offset in list(self.has[member]):
                del self.has[member][offset]
            opened = self.open(limit)
        records_max = self.chance.randint(1, 9)
        found = self.claim(member, records_max, limit)
        assert not isinstance(found, Refused), found
        if found is None:
            in_hand = [it for it in self.slices if it.member_id == member]
            assert not opened or len(in_hand) >= 4 or self.slices.size >= 60 or len(self.slices) >= 11
            return
        offsets = range(found.start, found.end + 1)
        assert found.start == opened[0], "the lowest open offset is offered first"
        assert set(offsets) <= set(opened), "no offset that is committed, held, or beyond the limit"
        if found.start < self.log_start:
            is_whole = found.end + 1 == min(limit, self.log_start) or found.end + 1 not in opened
            assert is_whole and found.end < self.log_start, "what was deleted is one slice"
        else:
            assert len(offsets) <= min(records_max, SETTINGS.records_max)
        if self.chance.random() < 0.2:
            assert self.claim(member, 9, limit) is found, "the same claim again gets the same slice"
        if self.chance.random() < 0.1:
            self.slices.cancel(found)
            return
        kept = self.chance.randint(found.start, found.end)
        assert self.slices.shrink(found, kept, kept - found.start + 1)
        if self.chance.random() < 0.1:
            self.slices.cancel(found)  # Of an older fetch with the same claim.
        self.sequence[member] += 1
        for offset in range(found.start, kept + 1):
            self.has[member][offset] = self.now_ms + SETTINGS.hold_ms

    def step_stale(self) -> None:
        """A number of the past, of an older session or an older epoch moves nothing."""
        member = self.chance.choice(sorted(self.live))
        known = any(it.member_id == member for it in self.slices) and self.sequence[member] > 1
        if not known:
            return
        wrong = self.chance.choice(
            [
                Claimant(member, self.epoch[member] - 1, self.session[member], self.sequence[member]),
                Claimant(member, self.epoch[member], self.session[member] - 1, 0),
                Claimant(member, self.epoch[member], self.session[member], self.sequence[member] - 2),
                Claimant(member, self.epoch[member], self.session[member], self.sequence[member] + 1),
                Claimant(member, self.epoch[member], self.session[member] + 1, 1),
            ]
        )
        self.sweep()
        before = [(it.start, it.end, it.member_id) for it in self.slices]
        refused = self.slices.claim(wrong, self.committed, self.end, 5, self.live.__contains__, self.now_ms)
        assert isinstance(refused, Refused)
        assert refused.message.endswith(".")
        assert [(it.start, it.end, it.member_id) for it in self.slices] == before

    def step_commit(self) -> None:
        member = self.chance.choice(sorted(self.live))
        self.expire()
        if not self.has[member]:
            return
        offset = self.chance.choice(sorted(self.has[member]))
        last = offset
        while last + 1 in self.has[member] and self.chance.random() < 0.9:
            last += 1
        assert self.holders(member, [(offset, last)]) == [None]
        for other in sorted(self.live - {member}):
            (holder,) = self.holders(other, [(offset, last)])
            assert holder is not None and holder.member_id == member, "another's commit does not count"
        if self.chance.random() < 0.3:  # Its member holds it, as long as it does; nobody else is handed it.
            some = set(range(offset, last + 1))
            if not some & self.committed.in_transactions:
                self.committed.in_transactions |= some
                self.transactions.append((offset, last))
            return
        for each in range(offset, last + 1):
            self.has[member].pop(each)
        self.committed.add(offset, last)

    def holders(self, member: str, ranges: list[tuple[int, int]]) -> list[Slice | None]:
        return list(self.slices.holders_of(member, ranges, self.live.__contains__, self.now_ms))

    def step_ask(self) -> None:
        """Of many ranges, which may overlap, each is told whether anything of it is with others."""
        member = self.chance.choice(MEMBERS)
        firsts = sorted(self.chance.randint(0, self.end) for _ in range(self.chance.randint(1, 6)))
        ranges = [(first, first + self.chance.choice((-1, 0, 3, self.end))) for first in firsts]
        others = [
            it
            for it in self.slices
            if it.member_id in self.live - {member} and not it.session.is_over and it.due_ms > self.now_ms
        ]
        for (first, last), holder in zip(ranges, self.holders(member, ranges), strict=True):
            assert holder is next((it for it in others if it.start <= last and it.end >= first <= last), None)

    def step_end(self, chance: float = 0.6) -> None:
        """A transaction ends."""
        if not self.transactions:
            return
        first, last = self.transactions.pop(self.chance.randrange(len(self.transactions)))
        self.committed.in_transactions -= set(range(first, last + 1))
        if self.chance.random() < chance:
            for offset in range(first, last + 1):
                for member in MEMBERS:
                    self.has[member].pop(offset, None)
            self.committed.add(first, last)
        else:
            self.committed.version += 1

    def step_die(self) -> None:
        member = self.chance.choice(MEMBERS)
        if member in self.live and len(self.live) > 1:
            self.live.discard(member)
        elif member not in self.live:
            self.sweep()
            self.live.add(member)
            self.has[member].clear()
            self.epoch[member] += 1
            self.session[member] += 1
            self.sequence[member] = 0

    def step_leader(self) -> None:
        """Another leader, with an empty book: members are told, and begin another session."""
        if self.chance.random() < 0.9:
            return
        self.slices = Slices(SETTINGS)
        for member in MEMBERS:
            if self.sequence[member]:
                refused = self.claim(member, 5, self.end)
                if member in self.live:
                    assert isinstance(refused, Refused) and refused.code is ErrorCode.SHARE_SESSION_NOT_FOUND
            self.has[member].clear()
            self.session[member] += 1
            self.sequence[member] = 0

    def step_reset(self) -> None:
        """The group is set back, or what it had committed is lost; more often, records are deleted."""
        if self.chance.random() < 0.9:
            self.log_start = max(self.log_start, self.chance.randint(0, self.end - 5))
            return
        self.expire()
        self.sweep()
        self.committed.lose(self.chance)
        self.transactions.clear()
        self.committed.in_transactions.clear()
        for it in self.slices:  # What their holders had committed of them is theirs again.
            for offset in set(range(it.start, it.end + 1)) - self.committed.offsets:
                self.has[it.member_id][offset] = it.due_ms

    def run(self) -> None:
        steps = [self.step_claim] * 8 + [self.step_commit] * 6 + [self.step_ask] * 3
        steps += [self.step_end, self.step_stale, self.step_die, self.step_leader, self.step_reset]
        for _ in range(STEPS):
            self.chance.choice(steps)()
            self.end += self.chance.choice((0, 0, 1, 3))
            self.now_ms += self.chance.choice((0, 1, 1, 5))
            held = [offset for it in self.slices for offset in range(it.start, it.end + 1)]
            assert len(held) == len(set(held)), "an offset is with one member at most"
            assert self.slices.size == sum(it.size for it in self.slices)
        self.quiet()

    def quiet(self) -> None:
        """Left alone, live members finish everything."""
        while self.transactions:
            self.step_end()
        for _ in range(3 * self.end):
            self.now_ms += 1
            member = self.chance.choice(sorted(self.live))
            found = self.claim(member, 7, self.end)
            if isinstance(found, Slice):
                self.slices.shrink(found, found.end, 1)
                self.sequence[member] += 1
                self.committed.add(found.start, found.end)
            if self.committed.stable == self.end:
                break
        else:
            raise AssertionError(f"committed up to {self.committed.stable} of {self.end}")
        assert self.claim(sorted(self.live)[0], 7, self.end) is None


@pytest.mark.parametrize("seed", range(40))
def test_each_offset_is_with_one_member_at_most_and_none_is_lost(seed: int) -> None:
    World(seed).run()


@pytest.mark.parametrize("seed", range(40, 60))
def test_the_same_holds_where_little_is_done_at_a_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("DROPPED_AT_A_TIME", "FREED_AT_A_TIME", "PASSED_AT_A_TIME", "LOOKED_AT"):
        monkeypatch.setattr(slices, bound, 2)
    monkeypatch.setattr(slices, "GATHERED_COST", 0)
    World(seed).run()


@settings(max_examples=30, deadline=None)
@given(st.integers(1000, 10**9))
def test_any_story(seed: int) -> None:
    World(seed).run()
