"""A group of table machines through random resizes, kills and late writers, against each key's count of records.

Small model: a log per partition with the key of each record, one changelog, one committed offset per partition. A
member processes a record by adding one to its key's count. Commits are one step (a transaction), and refused to members
that have lost the partition. At any moment a member finds exactly the count of the key's earlier records.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.table import Table
from anabranch.machines.lineage import Lineage
from anabranch.machines.placement import place
from anabranch.records.hashing import placement_hash

KEYS = [b"k%d" % number for number in range(24)]
INITIAL = 2


class Member:
    """A process with a table."""

    def __init__(self) -> None:
        self.table = Table()
        self.positions: dict[int, int] = {}


class World:
    """A topic, its group and its changelog."""

    def __init__(self) -> None:
        self.counts = [INITIAL]
        self.ends: list[dict[int, int]] = []
        self.logs: dict[int, list[tuple[bytes, int]]] = {number: [] for number in range(INITIAL)}
        self.sent: dict[bytes, int] = dict.fromkeys(KEYS, 0)
        self.changelog: dict[bytes, bytes] = {}
        self.committed: dict[int, int] = {}
        self.members = [Member() for _ in range(3)]
        self.owners: dict[int, int] = {}

    @property
    def lineage(self) -> Lineage:
        return Lineage.of_ends(INITIAL, self.counts, self.ends)

    def send(self, key: bytes) -> None:
        number = place(placement_hash(key), INITIAL, self.counts[-1])
        self.logs.setdefault(number, []).append((key, self.sent[key]))
        self.sent[key] += 1

    def resize(self, count: int) -> None:
        if count != self.counts[-1]:
            self.ends.append({number: len(log) for number, log in self.logs.items()})
            self.counts.append(count)
            for number in range(count):
                self.logs.setdefault(number, [])

    def give(self, number: int, owner: int, *, killed: bool) -> None:
        """Move a partition; a member that is not killed commits before."""
        if number not in self.logs:
            return
        before = self.owners.get(number)
        if before == owner:
            return
        if before is not None:
            if not killed:
                self.commit(before, number)
            self.members[before].table.release([TopicPartition("t", number)])
            self.members[before].positions.pop(number, None)
        self.owners[number] = owner
        self.members[owner].positions[number] = self.committed.get(number, 0)

    def read(self, number: int, most: int) -> None:
        """Have the owner of a partition process some records, as far as gates are open."""
        if number not in self.owners:
            return
        member = self.members[self.owners[number]]
        tp, start = TopicPartition("t", number), member.positions[number]
        progress = {each: self.committed.get(each, 0) for each in self.logs}
        limit = self.lineage.deliverable(progress).get(number)
        # What is committed decides about other partitions; in its own the member has read on.
        end = min(len(self.logs[number]), start + most, len(self.logs[number]) if limit is None else limit)
        if end <= start:
            return
        table = member.table
        table.advance(self.lineage, {TopicPartition("t", each): at for each, at in member.positions.items()})
        if not table.admit(self.lineage, tp, start, end):
            for load in table.take_loads():
                table.fill(load, self.changelog.items())
                table.loaded(load)
            if not table.admit(self.lineage, tp, start, end):
                assert table.flush_wanted
                return
        for offset in range(start, end):
            key, expected = self.logs[number][offset]
            found = int(table.get(key) or b"0")
            assert found == expected, (key, found, expected)
            table.put(key, b"%d" % (found + 1), offset + 1)
        member.positions[number] = end

    def commit(self, owner: int, number: int, back: int = 0) -> None:
        """Commit a partition, up to `back` records before the position: later work is not finished."""
        member = self.members[owner]
        if self.owners.get(number) != owner:
            return  # Refused: the transaction is aborted.
        offset = max(self.committed.get(number, 0), member.positions[number] - back)
        writes = [write for some in member.table.writes({TopicPartition("t", number): offset}) for write in some]
        for write in writes:
            assert write.value is not None
            self.changelog[write.key] = write.value
        self.committed[number] = offset
        list(member.table.flushed())

    def finish(self) -> None:
        """Process everything."""
        for number in self.logs:
            if number not in self.owners:
                self.give(number, number % 3, killed=False)
        for _ in range(4 * len(self.counts) + 4):
            for number in self.logs:
                self.read(number, 1_000)
                self.commit(self.owners[number], number)
        assert all(self.committed.get(number, 0) == len(log) for number, log in self.logs.items())
        assert {key: int(self.changelog.get(key, b"0")) for key in KEYS} == self.sent


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(KEYS), st.just(0)),
        st.tuples(st.just("send"), st.sampled_from(KEYS), st.just(0)),
        st.tuples(st.just("resize"), st.integers(INITIAL, 7), st.just(0)),
        st.tuples(st.sampled_from(["give", "kill"]), st.integers(0, 6), st.integers(0, 2)),
        st.tuples(st.just("read"), st.integers(0, 6), st.integers(1, 9)),
        st.tuples(st.just("read"), st.integers(0, 6), st.integers(1, 9)),
        st.tuples(st.just("commit"), st.integers(0, 6), st.integers(0, 2)),
    ),
    max_size=120,
)


TWO_GROWTHS = [
    ("send", b"k0", 0), ("resize", 4, 0), ("resize", 6, 0), ("send", b"k22", 0), ("resize", 2, 0), ("send", b"k0", 0),
]  # fmt: skip
"""A partition that passes two growths at once: what the first narrowing had left was dropped by the second."""


@given(STEPS)
@example(TWO_GROWTHS)
@settings(max_examples=300, deadline=None)
def test_each_member_finds_the_count_of_exactly_the_records_before(steps: list[tuple[str, int | bytes, int]]) -> None:
    world = World()
    for number in range(INITIAL):
        world.give(number, number, killed=False)
    for step, what, more in steps:
        if isinstance(what, bytes):
            world.send(what)
        elif step == "resize":
            world.resize(what)
        elif step in ("give", "kill"):
            world.give(what, more, killed=step == "kill")
        elif step == "read":
            world.read(what, more)
        elif what in world.owners:
            world.commit(world.owners[what], what, back=more)
    world.finish()
