"""Positions that stay in the log until they are asked for: the same as if they had been read at once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from anabranch.base.errors import DecodeError
from anabranch.machines.groups import unread as module
from anabranch.machines.groups.positions import Position, Positions, position_record
from anabranch.machines.groups.records import CoordinatorRecord, encode_record
from anabranch.machines.groups.unread import Unread
from anabranch.records.bulk_scan import spans, walk
from anabranch.records.key_values import Pair, encode_pairs

GROUPS = ["", "g", "group", "group-1", "group-2", "ü" * 40, "a" * 8, "a" * 9, "x" * 200 + "1", "x" * 200 + "2"]


def window(pairs: list[Pair]) -> tuple[memoryview, list[bool], Unread]:
    data = memoryview(bytes(encode_pairs(pairs, 0)))
    unread = Unread()
    mine = unread.add(data, spans(data, walk(data)))
    unread.close()
    return data, mine.tolist(), unread


def history(seed: int) -> tuple[Positions, Unread]:
    """The same random commits, applied and unread."""
    chance = random.Random(seed)
    applied, unread = Positions(), Unread()
    for _ in range(20):
        pairs: list[Pair] = []
        for _ in range(chance.randrange(1, 30)):
            position = None if chance.random() < 0.2 else Position(chance.randrange(1_000), metadata="note")
            record = position_record(chance.choice(GROUPS), chance.choice("tu"), chance.randrange(3), position)
            applied.apply(record.key, record.value)
            pairs.append(encode_record(record))
        data = memoryview(bytes(encode_pairs(pairs, 0)))
        assert unread.add(data, spans(data, walk(data))).all()
    unread.close()
    return applied, unread


@pytest.mark.parametrize("collide", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_unread_positions_are_those_that_were_committed(
    seed: int, collide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if collide:
        real = module._hashes
        monkeypatch.setattr(module, "_hashes", lambda *given: (real(*given)[0] % np.uint64(2), real(*given)[1]))
    applied, unread = history(seed)
    lazy = Positions(unread=unread)
    assert lazy.get("group-1", "t", 0) == applied.get("group-1", "t", 0)
    assert dict(lazy.entries("g")) == dict(applied.entries("g"))
    assert "nobody" not in lazy
    assert all((group in lazy) == (group in applied) for group in GROUPS[:3])
    if seed % 2:
        assert lazy.groups() == applied.groups()
    newer = position_record("group", "t", 0, Position(5_000))
    for positions in (lazy, applied):
        positions.apply(newer.key, newer.value)
    steps = 0
    while lazy.read_some(3):
        steps += 1
    assert steps or seed % 2
    assert lazy.unread is None
    assert lazy == applied
    assert lazy.groups() == applied.groups()


def test_what_is_no_position_is_left_to_others() -> None:
    position = encode_record(position_record("g", "t", 0, Position(1)))
    pairs: list[Pair] = [(b"\0\5other", b"x"), position, (b"", b""), (None, b""), (b"\0", b""), (b"\1\1x", b"")]
    _, mine, unread = window(pairs)
    assert mine == [False, True, False, False, False, False]
    assert len(unread) == 1
    assert unread.names() == {"g"}
    assert unread.take("g") == dict([position])
    assert unread.take("g") == {}
    assert unread.names() == unread.next_names() == set()


@pytest.mark.parametrize("key", [b"\0\1", b"\0\1\0\1g\0\0\0\0", b"\0\1\x7f\xffgroup\0\1t\0\0\0\0"])
def test_a_damaged_key_is_an_error(key: bytes) -> None:
    with pytest.raises(DecodeError):
        window([(key, b"")])


def test_nothing_is_unread_in_a_log_without_positions() -> None:
    _, _, unread = window([(b"\0\5other", b"x")])
    assert len(unread) == 0
    assert unread.names() == unread.doubtful() == unread.next_names() == set()
    assert unread.take("g") == {}


def test_a_transaction_overtakes_what_is_unread_and_what_is_committed_later_overtakes_it() -> None:
    _, _, unread = window([encode_record(position_record("g", "t", number, Position(1))) for number in range(3)])
    positions = Positions(unread=unread)
    for producer_id, partition, offset in ((7, 0, 10), (8, 0, 20), (7, 1, 10), (9, 2, 10)):
        record = position_record("g", "t", partition, Position(offset))
        positions.apply(record.key, record.value, producer_id)
    plain: CoordinatorRecord = position_record("g", "t", 1, Position(30))
    positions.apply(plain.key, plain.value)
    for producer_id, committed in ((8, True), (7, True), (9, False)):
        positions.end_transaction(producer_id, committed=committed)
    assert {at: position.offset for at, position in positions.entries("g")} == {("t", 0): 20, ("t", 1): 30, ("t", 2): 1}
    assert not positions.has_pending("g")
