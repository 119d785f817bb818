"""Which write-ahead logs show damage, as every bit that flips after a kill; which are as a crash leaves them."""

from __future__ import annotations

import random
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from anabranch.storage.metadata import wal

FRAME = 24 + 4096
SUFFIXES = ("", "-wal", "-shm")


@pytest.fixture(params=[FRAME, 1_000])
def killed(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database as a killed process leaves it: some transactions are in its log alone."""
    if request.param != FRAME:
        monkeypatch.setattr(wal, "FRAMES_AT_A_TIME", 3)
    (tmp_path / "live").mkdir()
    path, left = tmp_path / "live" / "metadata.sqlite", tmp_path / "metadata.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("CREATE TABLE some (number INTEGER, value BLOB)")
        for number in range(12):
            database.execute("INSERT INTO some VALUES (?, ?)", (number, bytes([number]) * 700 * (number % 4)))
        for suffix in SUFFIXES:
            shutil.copyfile(path.with_name(path.name + suffix), left.with_name(left.name + suffix))
    return left


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def is_sound(path: Path) -> bool:
    try:
        wal.check(path)
    except sqlite3.DatabaseError:
        return False
    return True


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT count(*) FROM some").fetchone()[0])


def flips(data: bytes) -> Iterator[bytes]:
    chance = random.Random(7)
    for _ in range(300):
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        yield bytes(changed)


def test_a_log_as_a_kill_leaves_it_is_sound_and_every_flipped_bit_and_cut_of_it_shows(killed: Path) -> None:
    log = beside(killed, "-wal")
    whole = log.read_bytes()
    assert is_sound(killed)
    for changed in flips(whole):
        log.write_bytes(changed)
        with pytest.raises(sqlite3.DatabaseError, match=r"metadata\.sqlite-wal"):
            wal.check(killed)
    for end in range(0, len(whole), 1_000):
        log.write_bytes(whole[:end])
        assert not is_sound(killed)
    log.unlink()
    assert not is_sound(killed)
    beside(killed, "-shm").unlink()
    assert is_sound(killed), "put in place by somebody"


def test_a_transaction_that_a_kill_has_torn_is_no_damage(killed: Path) -> None:
    """Its first frames are there, and half of the next one; the transactions before are whole."""
    log = beside(killed, "-wal")
    whole = log.read_bytes()
    torn = bytearray(whole[-FRAME:])
    torn[4:8] = bytes(4)  # Not the last one of its transaction.
    for tail in (torn, torn * 2, torn[:-1_000], torn[:30]):
        log.write_bytes(whole + tail)
        assert is_sound(killed)
    assert rows(killed) == 12


def test_after_a_loss_of_power_frames_tell_of_damage_but_for_that_of_the_last_transaction(killed: Path) -> None:
    log = beside(killed, "-wal")
    whole = log.read_bytes()
    beside(killed, "-shm").unlink()
    assert is_sound(killed)
    for end in range(0, len(whole), 1_000):  # A log that was not synced to its end.
        log.write_bytes(whole[:end])
        assert is_sound(killed) or not whole[:end]
    for at in range(32, len(whole) - 3 * FRAME, 500):
        changed = bytearray(whole)
        changed[at] ^= 1
        log.write_bytes(changed)
        commits = [pages for pages in pages_of(changed[32:])[(at - 32) // FRAME :] if pages]
        assert is_sound(killed) == (len(commits) <= 1), at
    log.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    assert not is_sound(killed)
    log.write_bytes(bytes(32) + whole[32:])
    assert not is_sound(killed), "a header is synced before the first frame"
    log.write_bytes(bytes(100_000) + whole[32:])
    assert not is_sound(killed), "not only a page is lost"
    log.write_bytes(bytes(32))
    assert is_sound(killed), "its header was not synced, and so no transaction"


def test_a_header_of_zeros_is_damage_where_the_index_counts_changes(killed: Path) -> None:
    beside(killed, "-wal").write_bytes(bytes(32))
    assert not is_sound(killed)


def pages_of(frames: bytes) -> list[int]:
    """The size of the database after each frame that ends a transaction, else 0; another generation's count as 0."""
    salts = frames[8:16]
    found = []
    for at in range(0, len(frames), FRAME):
        (pages,) = struct.unpack_from(">I", frames, at + 4)
        found.append(pages if frames[at + 8 : at + 16] == salts else 0)
    return found


def test_an_index_of_another_generation_says_nothing(killed: Path) -> None:
    """After a loss of power it may be older than the log."""
    old = beside(killed, "-shm").read_bytes()
    with closing(sqlite3.connect(killed, isolation_level=None)) as database:
        database.execute("PRAGMA wal_checkpoint(RESTART)")
        database.execute("INSERT INTO some VALUES (99, x'00')")
        for suffix in SUFFIXES:
            shutil.copyfile(beside(killed, suffix), beside(killed.with_name("later"), suffix))
    later = killed.with_name("metadata.sqlite")
    for suffix in SUFFIXES:
        shutil.copyfile(beside(killed.with_name("later"), suffix), beside(later, suffix))
    assert is_sound(later)
    beside(later, "-shm").write_bytes(old)
    assert is_sound(later) and rows(later) == 13


def test_an_index_that_is_damaged_says_nothing(killed: Path) -> None:
    index = beside(killed, "-shm")
    whole = index.read_bytes()
    for changed in flips(whole[:96]):
        index.write_bytes(changed + whole[96:])
        assert is_sound(killed)
    index.write_bytes(whole[:50])
    assert is_sound(killed)


def count(path: Path, *, backfilled: int | None = None, attempted: int | None = None) -> int:
    """Set what the index says of copying into the database; return how many frames it counts."""
    index = beside(path, "-shm")
    data = bytearray(index.read_bytes())
    for place, number in ((96, backfilled), (128, attempted)):
        if number is not None:
            struct.pack_into("=I", data, place, number)
    index.write_bytes(data)
    return int(struct.unpack_from("=I", data, 16)[0])


def test_what_remains_of_a_damaged_log_is_what_was_before_unless_later_pages_may_be_in_the_database(
    killed: Path,
) -> None:
    frames = count(killed)
    log = beside(killed, "-wal")
    whole = log.read_bytes()
    assert frames > 6
    damaged = bytearray(whole)
    damaged[32 + 4 * FRAME + 100] ^= 1
    log.write_bytes(damaged)
    assert wal.remains(killed, index_is_old=False) is wal.Remains.BEFORE
    assert wal.remains(killed, index_is_old=True) is wal.Remains.NOTHING
    count(killed, backfilled=1, attempted=2)
    assert wal.remains(killed, index_is_old=False) is wal.Remains.BEFORE, "those are in what is sound of the log"
    count(killed, backfilled=1, attempted=frames)
    assert wal.remains(killed, index_is_old=False) is wal.Remains.NOTHING
    count(killed, backfilled=frames)
    assert wal.remains(killed, index_is_old=False) is wal.Remains.ALL
    log.unlink()
    count(killed, backfilled=0, attempted=0)
    assert wal.remains(killed, index_is_old=False) is wal.Remains.BEFORE
    count(killed, attempted=1)
    assert wal.remains(killed, index_is_old=False) is wal.Remains.NOTHING
    beside(killed, "-shm").unlink()
    assert wal.remains(killed, index_is_old=False) is wal.Remains.NOTHING


def test_an_index_says_how_far_sqlite_itself_has_copied(killed: Path) -> None:
    with closing(sqlite3.connect(killed, isolation_level=None)) as database, closing(sqlite3.connect(killed)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM some").fetchone()
        database.execute("INSERT INTO some VALUES (99, x'00')")
        database.execute("PRAGMA wal_checkpoint(PASSIVE)")
        database.execute("INSERT INTO some VALUES (100, x'00')")
        data = beside(killed, "-shm").read_bytes()
    frames, backfilled, attempted = (struct.unpack_from("=I", data, place)[0] for place in (16, 96, 128))
    assert 0 < backfilled == attempted < frames
