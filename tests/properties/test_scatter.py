"""Batches scattered by key against a model that goes record by record; plain Python, and the compiled code that brokers
run."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.base.errors import DecodeError
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, cuts, interval, keyless_spread, spread
from anabranch.records.batch import ChecksumError
from anabranch.records.compression import ExpandsTooFarError
from anabranch.records.filtering import (
    SIZE_MAX,
    Cell,
    Gathered,
    Load,
    Scatter,
    Selection,
    Spread,
    in_one_piece,
    scatter,
)
from anabranch.records.hashing import murmur2
from anabranch.runtime import native
from anabranch.runtime.gathered import Gathered as RealGathered
from anabranch.runtime.native_scatter import NativeScatter
from tests.properties import record_model as model
from tests.support.thorough import THOROUGH

LIMITS = {"record_size_max": 1 << 22, "work_size_max": 1 << 22}


@pytest.fixture(scope="module")
def compiled() -> Scatter:
    if native.load() is None:
        native.build()
    found = native.load()
    assert found is not None
    return found.scatter


def _place(row: model.Row, initial: int, held: Interval) -> int:
    return keyless_spread(row.offset, held) if row.key is None else spread(murmur2(row.key), initial)


def _takes(selection: Selection, row: model.Row, place: int) -> int | None:
    """The target that wants a record."""
    if selection.keys_wanted and row.key not in selection.keys_wanted:
        return None
    if row.key is not None and row.key in selection.keys_refused:
        return None
    size = len(row.key or b"") + len(row.value or b"")
    if not selection.size_min <= size <= selection.size_max:
        return None
    found = [cell.target for cell in selection.cells if cell.start <= place <= cell.last]
    assert len(found) <= 1
    return found[0] if found else None


def _expected(batches: list[model.Batch], selection: Selection, initial: int, held: Interval) -> list[bytes]:
    made = [b""] * selection.targets
    for batch in batches:
        if batch.control:
            made = [each + model.encode(batch) for each in made]
            continue
        for target in range(selection.targets):
            rows = [row for row in batch.rows if _takes(selection, row, _place(row, initial, held)) == target]
            if not rows:
                continue
            base = batch.rows[0].timestamp
            latest = max(row.timestamp for row in batch.rows)
            records = b"".join(model.encode_record(row, batch.base_offset, base) for row in rows)
            plain = replace(batch, codec=0, last_offset=max(batch.last_offset, batch.rows[-1].offset))
            stamped = latest if batch.log_append_time is None else batch.log_append_time
            made[target] += model.frame(plain, records, len(rows), base, stamped)
    return made


def _batches(chance: Random, size: int) -> list[model.Batch]:
    found: list[model.Batch] = []
    offset = chance.choice([0, 7, 1 << 33])
    for _ in range(size):
        if chance.random() < 0.1:
            found.append(model.Batch(offset, (), control=True, abort=chance.random() < 0.5, last_offset=offset))
            offset += 1
            continue
        rows = []
        at = offset
        for _ in range(chance.choice([0, 1, 2, 5, 40, 300])):
            at += chance.choice([0, 0, 0, 1, 130])  # Compaction leaves records out.
            key = chance.choice([None, b"", b"k%d" % chance.randrange(50), chance.randbytes(chance.randrange(20))])
            value = chance.choice([None, b"", b"v", chance.randbytes(chance.choice([3, 7, 15, 31, 63, 64, 65, 300]))])
            headers = (("h", b"1"), ("n", None)) if chance.random() < 0.1 else ()
            rows.append(model.Row(at, chance.randrange(1 << 41), key, value, headers))
            at += 1
        last = max(at - 1, offset)
        found.append(
            model.Batch(
                offset,
                tuple(rows),
                codec=chance.choice([0, 0, 1, 2, 3, 4]) if rows else 0,
                last_offset=last,
                leader_epoch=chance.randrange(9),
                log_append_time=chance.choice([None, 77]) if rows else None,
                producer_id=chance.choice([-1, 12]),
                transactional=chance.random() < 0.3,
            )
        )
        offset = last + 1
    return found


def _selection(chance: Random, batches: list[model.Batch], initial: int, held: Interval) -> Selection:
    """Cells with bounds at, and right beside, places that records have."""
    places = [_place(row, initial, held) for batch in batches for row in batch.rows]
    near = [place + step for place in places for step in (-1, 0, 1)]
    near += [chance.randrange(1, 1 << 10) << 53 for _ in range(3 * chance.randrange(2))]  # Where parts of a guide end.
    near = [place for place in near if 0 < place <= SPACE_END] or [1]
    bounds = sorted({0, *chance.choices(near, k=chance.choice([0, 1, 3, 9, 70]))})
    targets = chance.choice([1, 2, 5])
    cells = []
    for start, after in zip(bounds, [*bounds[1:], SPACE_END + 1], strict=True):
        if chance.random() < 0.8:
            cells.append(Cell(start, after - 1, chance.randrange(targets)))
    keys = sorted({row.key for batch in batches for row in batch.rows if row.key is not None})
    some = tuple(chance.sample(keys, chance.randrange(min(len(keys), 9) + 1)))
    return Selection(
        tuple(cells),
        targets,
        some if chance.random() < 0.2 else (),
        some if chance.random() < 0.2 else (),
        chance.choice([0, 0, 0, 2]),
        chance.choice([SIZE_MAX, SIZE_MAX, 40]),
    )


def _rows_between(batches: list[model.Batch], start: int, end: int) -> int:
    return sum(len(batch.rows) for batch in batches if start <= batch.base_offset < end)


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 1 << 40), size=st.integers(1, 8))
def test_each_reader_is_given_the_records_of_its_keys(compiled: Scatter, seed: int, size: int) -> None:
    chance = Random(seed)
    batches = _batches(chance, size)
    initial = chance.choice([1, 2, 3, 7, 12, 1_000, 99_991])
    held = chance.choice([SPACE, interval(0, 4 * initial, initial), interval(3 * initial, 4 * initial, initial)])
    selection = _selection(chance, batches, initial, held)
    data = b"".join(map(model.encode, batches))
    expected = _expected(batches, selection, initial, held)
    for work_size_max in (1 << 22, 0):
        for run in (compiled, scatter):
            view = memoryview(data + data[: chance.choice([0, 30, 60])])
            made: list[bytes] = [b""] * selection.targets
            records = 0
            behind = -1
            while True:
                load = chance.choice([None, Load(held)])
                found = run(
                    view,
                    selection,
                    Spread(initial, held),
                    record_size_max=1 << 22,
                    work_size_max=work_size_max,
                    load=load,
                )
                made = [one + in_one_piece(two) for one, two in zip(made, found.data, strict=True)]
                records += sum(found.records)
                if load is not None:
                    rows = _rows_between(batches, behind, found.next_offset)
                    assert sum(load.records) == rows
                behind = max(behind, found.next_offset)
                if not found.size:
                    break
                view = view[found.size :]
            assert made == expected
            assert behind == batches[-1].last_offset + 1
            taken = [row for batch in batches for row in batch.rows]
            assert records == sum(_takes(selection, row, _place(row, initial, held)) is not None for row in taken)


def test_readers_are_given_more_or_less_than_before(compiled: Scatter) -> None:
    """Room is made for what a reader had of the last run; the next one may be quite another."""
    cells = (Cell(0, SPACE_END // 2, 0), Cell(SPACE_END // 2 + 1, SPACE_END, 1))
    selection, held = Selection(cells, 2), SPACE
    keys = [b"%d" % number for number in range(200)]
    low = [key for key in keys if spread(murmur2(key), 1) <= SPACE_END // 2]
    kept: list[tuple[Sequence[bytes | memoryview | Gathered], list[bytes]]] = []
    for part in (1.0, 1.0, 0.5, 0.0, 1.0, 0.5, 0.5, 0.02, 0.9):
        chance, offset, batches = Random(5), 0, []
        for _ in range(100):
            rows = []
            for at in range(offset, offset + 15):
                key = chance.choice(low if chance.random() < part else [key for key in keys if key not in low])
                rows.append(model.Row(at, 5, key, chance.randbytes(1_000)))
            batches.append(model.Batch(offset, tuple(rows), last_offset=offset + 14))
            offset += 15
        data = b"".join(map(model.encode, batches))
        found = compiled(memoryview(data), selection, Spread(1, held), **LIMITS)
        assert found.size == len(data)
        kept.append((found.data, _expected(batches, selection, 1, held)))
    for made, expected in kept:  # What is kept is not written again.
        assert list(map(in_one_piece, made)) == expected
    referred = [made for made, _ in kept if any(isinstance(each, RealGathered) for each in made)]
    assert referred or not native.variant().suffix  # Where checksums are taken elsewhere all is copied.


@pytest.mark.parametrize("seed", range(12))
def test_long_records_are_given_as_they_lie_with_short_ones_and_whole_batches_between(
    compiled: Scatter, seed: int
) -> None:
    """Also where a batch does not fit into what was prepared by the size of the first one."""
    chance, offset = Random(seed), 0
    batches: list[model.Batch] = []
    while offset < 60 or chance.random() < 0.98:
        if batches and chance.random() < 0.1:
            batches.append(model.Batch(offset, (), control=True, abort=False, last_offset=offset))
        else:
            count = chance.choice([1, 5, 16, 16, 16, 60]) if batches else 16
            sizes = [0, 300, 490, 495, 500, 505, 510, 1_000, 1_024, 3_000] if batches else [1_000]
            rows = [
                model.Row(at, 5, chance.choice([None, b"k%d" % at]), chance.randbytes(chance.choice(sizes)))
                for at in range(offset, offset + count)
            ]
            codec = chance.choice([0, 0, 0, 0, 0, 0, 4]) if batches else 0
            batches.append(model.Batch(offset, tuple(rows), codec=codec, last_offset=offset + count - 1))
        offset = batches[-1].last_offset + 1
    count = chance.choice([1, 2, 3])
    cells = tuple(Cell(start, end, place) for place, (start, end) in enumerate(cuts(SPACE, count)))
    selection = Selection(cells, count, size_min=chance.choice([0, 0, 100]))
    data = b"".join(map(model.encode, batches))
    expected = Load(SPACE)
    plain = scatter(memoryview(data), selection, Spread(1, SPACE), load=expected, **LIMITS)
    for load in (None, None, Load(SPACE)):
        found = compiled(memoryview(data), selection, Spread(1, SPACE), load=load, **LIMITS)
        assert list(map(in_one_piece, found.data)) == list(plain.data)
        assert (found.records, found.next_offset, found.size) == (plain.records, plain.next_offset, plain.size)
    assert load is not None and (load.records, load.bytes) == (expected.records, expected.bytes)


def test_load_is_counted_where_keys_lie(compiled: Scatter) -> None:
    held = interval(0, 4, 1)
    rows = tuple(model.Row(offset, 5, None, b"v" * 30) for offset in range(640))
    data = memoryview(model.encode(model.Batch(0, rows)))
    loads = []
    for run in (compiled, scatter):
        load = Load(held)
        run(data, Selection((), 0), Spread(1, held), load=load, **LIMITS)
        loads.append((load.records, load.bytes))
    assert loads[0] == loads[1]
    assert sum(loads[0][0]) == 640
    assert sum(loads[0][1]) == len(data) - 61
    assert min(loads[0][0]) > 0


def test_a_bomb_is_refused_and_what_comes_before_it_is_bounded(compiled: Scatter) -> None:
    bomb = model.encode(model.Batch(5, (model.Row(5, 1, b"k", b"\0" * 5_000_000),), codec=4))
    assert len(bomb) < 5_000
    selection = Selection((Cell(0, SPACE_END, 0),), 1)
    for run in (compiled, scatter):
        with pytest.raises(ExpandsTooFarError):
            run(memoryview(bomb), selection, Spread(1, SPACE), record_size_max=1 << 20, work_size_max=1 << 30)
        three = memoryview(bomb * 3)
        found = run(three, selection, Spread(1, SPACE), record_size_max=1 << 23, work_size_max=1 << 20)
        assert found.size == len(bomb)
        assert len(found.data[0]) > 5_000_000


def test_a_compressed_batch_behind_one_that_needed_more_room_is_given_its_own_records(compiled: Scatter) -> None:
    """The first one expands to more than there was room for; then a plain one does not fit behind it."""
    batches = [
        model.Batch(0, (model.Row(0, 1, b"k", b"a" * 300_000),), codec=4),
        model.Batch(1, (model.Row(1, 1, b"k", b"b" * 300_000),)),
        model.Batch(2, (model.Row(2, 1, b"k", b"c" * 300),), codec=1),
        model.Batch(3, (model.Row(3, 1, b"k", b"d" * 300),)),
    ]
    selection = Selection((Cell(0, SPACE_END, 0),), 1)
    found = compiled(memoryview(b"".join(map(model.encode, batches))), selection, Spread(1, SPACE), **LIMITS)
    assert [bytes(each) for each in found.data] == _expected(batches, selection, 1, SPACE)


@pytest.mark.parametrize("codec", [0, 4])
@pytest.mark.parametrize("size", [600, 70_000], ids=["copied", "sent from where they lie"])
@pytest.mark.parametrize("way", ["compiled", "plain", "without checksums in the kernel"])
def test_what_has_changed_since_it_was_written_is_not_given_on_under_a_new_checksum(
    compiled: Scatter, codec: int, size: int, way: str
) -> None:
    """One bit of a value passed for sound. What comes before is given; load is counted of what is there."""
    runs = {"compiled": compiled, "plain": scatter, "without checksums in the kernel": _without_checksums(compiled)}
    run, whole = runs[way], Selection((Cell(0, SPACE_END, 0),), 1)
    first, second = (
        bytearray(model.encode(model.Batch(at, (model.Row(at, 1, b"k", b"v" * size),), codec=codec))) for at in (5, 6)
    )
    sound = run(memoryview(first + second), whole, Spread(1, SPACE), **LIMITS)
    second[-100 if not codec else -3] ^= 1
    found = run(memoryview(first + second), whole, Spread(1, SPACE), **LIMITS)
    assert (found.size, found.next_offset, found.records) == (len(first), 6, [1])
    assert bytes(in_one_piece(sound.data[0])).startswith(bytes(in_one_piece(found.data[0])))
    with pytest.raises(ChecksumError, match="offset 6"):
        run(memoryview(second), whole, Spread(1, SPACE), **LIMITS)


def test_no_byte_changes_unseen_in_records_that_are_sent_from_where_they_lie(compiled: Scatter) -> None:
    """Records are read before the checksum of their batch is known: its count, and their numbers, may be wrong, too."""
    whole = Selection(tuple(Cell(start, end, place) for place, (start, end) in enumerate(cuts(SPACE, 2))), 2)
    rows = [model.Row(at, 1, b"key %d" % at, b"v" * (1_000 + at)) for at in range(200)]
    first, second = (model.encode(model.Batch(at[0].offset, tuple(at))) for at in (rows[:150], rows[150:]))
    for _ in "12":  # There is room for pieces for what the last run gave.
        sound = compiled(memoryview(first + second), whole, Spread(1, SPACE), **LIMITS)
    assert any(isinstance(each, RealGathered) for each in sound.data)
    for place in (*range(17, 90), *range(1_040, 1_080), len(second) - 9, len(second) - 1):
        for bit in (0, 6, 7):
            changed = bytearray(first + second)
            changed[len(first) + place] ^= 1 << bit
            found = compiled(memoryview(changed), whole, Spread(1, SPACE), **LIMITS)
            assert (found.size, found.next_offset) == (len(first), 150), place
            assert sum(found.records) == 150


def _without_checksums(compiled: Scatter) -> Scatter:
    """The same for a processor without an instruction for them."""
    assert isinstance(compiled, NativeScatter)
    other = copy.copy(compiled)
    other._tables = None
    return other


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 1 << 40))
def test_damaged_batches_are_errors_or_batches(compiled: Scatter, seed: int) -> None:
    chance = Random(seed)
    data = bytearray(b"".join(map(model.encode, _batches(chance, 3))))
    for _ in range(chance.randrange(1, 6)):
        if data:
            data[chance.randrange(len(data))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    del data[chance.randrange(len(data) + 1) :]
    if chance.random() < 0.8:
        model.restamped(data)
    selection = Selection((Cell(0, SPACE_END // 3, 0), Cell(SPACE_END // 3 + 1, SPACE_END, 1)), 2, size_min=1)
    try:
        found = compiled(memoryview(bytes(data)), selection, Spread(1, SPACE), **LIMITS)
    except DecodeError:
        return
    assert found.size <= len(data)
    assert sum(map(len, found.data)) <= found.expanded_size + 2 * len(data)


@pytest.mark.parametrize("joins", [True, False], ids=["joins", "tables"])
def test_processors_without_folding_make_the_same(joins: bool) -> None:
    """The code for processors that have an instruction for checksums, as it would be compiled there: with `joins`, and
    multiplication without carries."""
    code = f"""
from anabranch.records.kernels import crc32c
crc32c.FOLDS_CRC = False
crc32c.JOINS_CRC = crc32c.JOINS_CRC and {joins}
import ctypes, mmap
from anabranch.records.kernels.ahead import machine_code
from anabranch.records.kernels.scatter import scatter
from anabranch.runtime import native
from anabranch.runtime.gathered import Gathered as RealGathered
from anabranch.runtime.native_scatter import NativeScatter
from tests.properties.test_scatter import _fixed
(variant,) = (each for each in native.VARIANTS[native.os.uname().machine] if each.suffix == "-crc")
code = machine_code(scatter, variant.features)
memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory[:] = code
print(_fixed(NativeScatter(ctypes.addressof(ctypes.c_char.from_buffer(memory)), checksums=True, joins={joins})))
"""
    if not native.variant().suffix:
        pytest.skip("this processor has no instruction for checksums")
    if joins and not THOROUGH:
        pytest.skip("the tables have more code of their own: make simulate")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"{_fixed(scatter)}\n", 0), done.stderr[-2000:]


def _fixed(run: Scatter) -> str:
    """A digest of what is made of some batches."""
    chance = Random(8)
    data = b"".join(map(model.encode, _batches(chance, 30)))
    cells = (Cell(0, SPACE_END // 3, 0), Cell(SPACE_END // 3 + 1, SPACE_END, 1))
    found = run(memoryview(data), Selection(cells, 2), Spread(3, SPACE), **LIMITS)
    assert found.size == len(data)
    return blake2b(b"".join(map(bytes, found.data))).hexdigest()
