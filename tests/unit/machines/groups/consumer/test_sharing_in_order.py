"""Sharing members that read, against the real coordinator: every record of every key in order, none passed over.

Members process records of their keys from the offsets that the coordinator tells, commit what they have done, and give
keys up as a client does. They are killed, lose answers, and commit what is not theirs; the coordinator fails over.
What counts is what applications were handed: a record may come again, but never before an earlier one of its key.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, union, without
from anabranch.machines.keyspace import SPACE_END, Interval
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from tests.support.groups import GROUP, topic_id
from tests.support.sharing import At, Sharer, SharingWorld, shared_topics

FOO = topic_id("foo")
KEYS = 24
Pieces = list[tuple[Interval, int]]
"""Keys, and the next offset to read of them."""


class Application:
    """The log of a topic, and what applications were handed of it."""

    def __init__(self, chance: random.Random, partitions: int) -> None:
        self.chance = chance
        self.keys = {number: [chance.randint(0, SPACE_END) for _ in range(KEYS)] for number in range(partitions)}
        self.log: dict[int, list[int]] = {number: [] for number in range(partitions)}
        self.done: dict[tuple[int, int], int] = {}
        self.before: dict[tuple[int, int], int] = {}
        """Of each record the offset of the one before it with its key; -1 for the first."""
        self._last: dict[tuple[int, int], int] = {}
        self.again = 0

    def append(self, count: int) -> None:
        """Write some records."""
        for _ in range(count):
            number = self.chance.choice(list(self.log))
            key = self.chance.choice(self.keys[number])
            offset = len(self.log[number])
            self.log[number].append(key)
            self.before[number, offset] = self._last.get((number, key), -1)
            self._last[number, key] = offset

    def hand(self, number: int, offset: int) -> None:
        """Hand a record to an application."""
        key = self.log[number][offset]
        done = self.done.get((number, key), -1)
        assert self.before[number, offset] <= done, f"record {offset} of {number} before one of its key"
        self.again += offset <= done
        self.done[number, key] = max(done, offset)

    def check_all_done(self) -> None:
        """Every record was handed out."""
        assert self.done == self._last


@dataclass
class Reader(Sharer):
    """A member that reads."""

    application: Application = field(kw_only=True)
    pieces: dict[At, Pieces] = field(default_factory=dict)

    def fetch(self) -> None:
        """Have pieces of exactly the keys that are owned; new ones begin where the group is."""
        for at in [at for at in self.pieces if at not in self.owned]:
            del self.pieces[at]
        for at, ranges in self.owned.items():
            kept = _within(self.pieces.get(at, []), ranges)
            have: Ranges = NONE
            for held, _ in kept:
                have = union(have, (held,))
            new = without(ranges, have)
            if new:
                kept += _within(self._committed(at), new)
            self.pieces[at] = kept

    def _committed(self, at: At) -> Pieces:
        asked = OffsetFetchRequestGroup(
            group_id=GROUP,
            member_id=self.name,
            member_epoch=self.epoch,
            topics=[OffsetFetchRequestTopics(topic_id=at[0], name="foo", partition_indexes=[at[1]])],
        )
        answer = self.world.coordinator.offset_fetch(asked, False, 10, self.world.now_ms)
        if answer.error_code:
            return []  # It begins when its epoch is the right one.
        (found,) = answer.topics[0].partitions
        if found.key_range_offsets:
            return [(Interval(it.start, it.end), it.offset) for it in found.key_range_offsets]
        return [(WHOLE[0], max(0, found.committed_offset))]

    def work(self, most: int) -> None:
        """Process some records of each piece."""
        for at, pieces in self.pieces.items():
            log = self.application.log[at[1]]
            for number, (held, offset) in enumerate(pieces):
                until = min(len(log), offset + most)
                for each in range(offset, until):
                    if held.start <= log[each] <= held.end:
                        self.application.hand(at[1], each)
                pieces[number] = held, until

    def commit_pieces(self, pieces: Mapping[At, Pieces]) -> list[int]:
        """Commit what is done of some keys."""
        codes = []
        for (topic, number), some in pieces.items():
            if not some:
                continue
            part = OffsetCommitRequestPartition(
                partition_index=number,
                committed_offset=-1,
                committed_metadata="",
                key_range_offsets=[KeyRangeOffset(start=it.start, end=it.end, offset=at) for it, at in some],
            )
            request = OffsetCommitRequest(
                group_id=GROUP,
                generation_id_or_member_epoch=self.epoch,
                member_id=self.name,
                topics=[OffsetCommitRequestTopic(topic_id=topic, name="foo", partitions=[part])],
            )
            answer = self.world.submit(
                lambda machine, request=request: machine.offset_commit(
                    request, Caller("client", "/host", 10), self.world.now_ms
                )
            )
            codes.append(answer.topics[0].partitions[0].error_code)
        return codes

    def follow(self) -> None:
        """Commit what is done of keys that are to be given up; then they are."""
        if self.told is not None:
            going = {at: without(ranges, self.told.get(at, NONE)) for at, ranges in self.owned.items()}
            self.commit_pieces({at: _within(self.pieces.get(at, []), ranges) for at, ranges in going.items()})
        super().follow()
        self.fetch()


def _within(pieces: Pieces, ranges: Ranges) -> Pieces:
    return [(part, offset) for held, offset in pieces for part in common((held,), ranges)]


@pytest.mark.parametrize("seed", range(12))
def test_every_record_of_a_key_comes_in_order_and_none_is_passed_over(seed: int) -> None:
    chance = random.Random(1_000 + seed)
    partitions = chance.randint(1, 2)
    world, application = SharingWorld(shared_topics(foo=partitions)), Application(chance, partitions)
    counter = 0
    zombies: list[Reader] = []
    for _ in range(150):
        readers = [member for member in world.members.values() if isinstance(member, Reader)]
        match chance.choice(("join", "join", "leave", "kill", "reload", "foreign", "zombie", *(["work"] * 14))):
            case "join" if len(readers) < 6:
                counter += 1
                world.members[f"m{counter}"] = Reader(
                    world, f"m{counter}", chance.random() < 0.9, application=application
                )
            case "leave" if len(readers) > 1:
                leaver = chance.choice(readers)
                if leaver.joined and world.knows(leaver):
                    leaver.commit_pieces(leaver.pieces)
                    world.leave_group(leaver.name)
            case "kill" if len(readers) > 2:
                dead = chance.choice(readers)
                zombies.append(dead)
                world.kill(dead.name)
            case "reload":
                world.reload(compact=chance.random() < 0.5)
            case "foreign" if readers:
                # A client with a mistake: it commits all keys of a partition that it has in part.
                member = chance.choice(readers)
                for at, ranges in member.owned.items():
                    known = world.group.members.get(member.name)
                    # An answer that gave it the rest may have been lost.
                    if ranges != WHOLE and known is not None and known.held(at) != WHOLE:
                        end = len(application.log[at[1]])
                        codes = member.commit_pieces({at: [(WHOLE[0], end)]})
                        assert codes != [ErrorCode.NONE]
            case "zombie" if zombies:
                zombie = chance.choice(zombies)
                everything = {(FOO, number): [(WHOLE[0], len(log))] for number, log in application.log.items()}
                assert not set(zombie.commit_pieces(everything)) & {ErrorCode.NONE}
            case _:
                application.append(chance.randint(0, 20))
                for member in readers:
                    if chance.random() < 0.6:
                        member.beat(lose_answer=chance.random() < 0.2)
                        world.check_owners()
                        member.fetch()
                    if chance.random() < 0.7:
                        member.work(chance.randint(1, 12))
                    if chance.random() < 0.5:
                        member.follow()
                    if chance.random() < 0.4 and member.joined:
                        member.commit_pieces(member.pieces)
        world.check_owners()
    if not world.members:
        world.members["last"] = Reader(world, "last", application=application)
    world.settle(rounds=20)
    for member in world.members.values():
        assert isinstance(member, Reader)
        member.fetch()
        member.work(10**6)
    application.check_all_done()
