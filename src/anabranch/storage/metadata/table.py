"""The table of nodes in a SQLite file, and what shows that a node is as it was written.

SQLite checks the form of its pages, not what they hold. So each row has a CRC-32C of its path, version, session and
bytes, and each reading of a row compares it. `SOUND` compares the rows with the indexes: an index entry that has
changed hides a node. The bytes of a node are the last column, because SQLite passes through all columns in front of the
one it reads, and the bytes may be a megabyte.

The version of the root counts the changes of the whole tree: it tells which of two copies is the later one. The
versions of other nodes do not, for a node that is deleted and created again begins anew.

Files of earlier versions have no checksums (`EARLIER`) until `rewrite`, and have not counted their changes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from anabranch.records.checksum import crc32c
from anabranch.storage.interface import parent_of

TABLE = """
CREATE TABLE IF NOT EXISTS node (
    path TEXT PRIMARY KEY NOT NULL,
    parent TEXT NOT NULL,
    version INTEGER NOT NULL,
    ephemeral INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    data BLOB NOT NULL
)
"""
INDEX = "CREATE INDEX IF NOT EXISTS node_parent ON node (parent)"
ROOT = "/"
SOUND = "PRAGMA integrity_check(1)"
UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""Errors of SQLite, whose texts repeat what is in the file, in any encoding."""
_SIX_BYTES = 1 << 32
_ALONE = "mode=ro&immutable=1"
"""How a file without a write-ahead log is opened."""
_VERSIONS = slice(18, 20)
"""The versions of the file format for writing and for reading, in the header."""
_REWRITTEN = (
    "ALTER TABLE node RENAME TO earlier",
    "DROP INDEX node_parent",
    TABLE,
    INDEX,
    "INSERT INTO node SELECT path, parent, version, ephemeral, node_crc(path, version, ephemeral, data), data "
    "FROM earlier ORDER BY path",
    "DROP TABLE earlier",
)


_TYPES = (str, int, int, bytes)
"""SQLite keeps the type of a value beside the value, and it can change as the value can."""


class Row(NamedTuple):
    """A node as it is stored."""

    path: str
    version: int
    session: int
    """The session that an ephemeral node belongs to; 0 for a lasting one."""
    crc: int | None
    """None in a file without checksums."""
    data: bytes

    @property
    def is_sound(self) -> bool:
        """Whether the row is as it was written, as far as its checksum tells."""
        if (type(self.path), type(self.version), type(self.session), type(self.data)) != _TYPES:
            return False
        return self.crc is None or self.crc == checksum(self.path, self.version, self.session, self.data)

    def stems_from(self, other: Row) -> bool:
        """Whether this row, which is damaged, was equal to a sound one: its checksum, or all else, still is."""
        was = checksum(other.path, other.version, other.session, other.data)
        return self.crc == was or self._replace(crc=None) == other._replace(crc=None)


def checksum(path: str, version: int, session: int, data: bytes) -> int:
    """Return the CRC-32C of all that a row holds, but for the parent, which follows from the path.

    All checksums are stored in as many bytes: where a row keeps its size, SQLite writes only the pages that change.
    """
    return crc32c(data, crc32c(b"%s %d %d " % (path.encode(), version, session))) | _SIX_BYTES


class Form(NamedTuple):
    """How the rows of a file are read and written."""

    has_checksums: bool
    select: str
    insert: str
    update: str

    def inserted(self, path: str, version: int, session: int, data: bytes) -> tuple[object, ...]:
        """Return the values for `insert`."""
        parent = parent_of(path) if path != ROOT else ""
        if self.has_checksums:
            return path, parent, version, session, checksum(path, version, session, data), data
        return path, parent, version, session, data

    def updated(self, path: str, version: int, session: int, data: bytes) -> tuple[object, ...]:
        """Return the values for `update`."""
        if self.has_checksums:
            return version, data, checksum(path, version, session, data), path
        return version, data, path


CURRENT = Form(
    True,
    "SELECT path, version, ephemeral, crc, data FROM node",
    "INSERT INTO node (path, parent, version, ephemeral, crc, data) VALUES (?, ?, ?, ?, ?, ?)",
    "UPDATE node SET version = ?, data = ?, crc = ? WHERE path = ?",
)
EARLIER = Form(
    False,
    "SELECT path, version, ephemeral, NULL, data FROM node",
    "INSERT INTO node (path, parent, version, ephemeral, data) VALUES (?, ?, ?, ?, ?)",
    "UPDATE node SET version = ?, data = ? WHERE path = ?",
)
"""A file of an earlier version; used as it is where it cannot be rewritten, as on a full disk."""
_FORMS = {
    ("path TEXT", "parent TEXT", "version INTEGER", "ephemeral INTEGER", "crc INTEGER", "data BLOB"): CURRENT,
    ("path TEXT", "parent TEXT", "data BLOB", "version INTEGER", "ephemeral INTEGER"): EARLIER,
}
_COLUMNS = "SELECT name || ' ' || type FROM pragma_table_info('node') ORDER BY cid"


def form_of(database: sqlite3.Connection) -> Form:
    """Tell the form of a file. sqlite3.DatabaseError where there never was such a form."""
    form = _FORMS.get(tuple(row[0] for row in database.execute(_COLUMNS)))
    if form is None:
        raise sqlite3.DatabaseError("its table is none of nodes")
    return form


def check_header(path: Path) -> None:
    """Refuse a file that SQLite would read but not write, because of its header. sqlite3.DatabaseError, OSError."""
    if path.is_file():
        with path.open("rb") as file:
            header = file.read(_VERSIONS.stop)
        if not set(header[_VERSIONS]) <= {1, 2}:
            raise sqlite3.DatabaseError("its header says that it cannot be written")


def odd_file(path: Path) -> Path | None:
    """Find what is no ordinary file, of a file and those that SQLite has beside it: it would wait for a pipe."""
    beside = (path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal"))
    return next((file for file in beside if os.path.lexists(file) and not file.is_file()), None)


def check_log(path: Path) -> None:
    """Compare the write-ahead log of a file that nobody has open. sqlite3.DatabaseError, OSError."""
    if any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-shm")):
        from anabranch.storage.metadata import wal  # With NumPy, after a kill alone.

        wal.check(path)


def rows(database: sqlite3.Connection) -> Generator[Row, None, None]:
    """Read all rows, sound ones and others. sqlite3.DatabaseError where the file is no sound database."""
    found = database.execute(SOUND).fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    with contextlib.closing(database.execute(form_of(database).select)) as selected:
        yield from map(Row._make, selected)


def check(database: sqlite3.Connection) -> None:
    """Compare all that a file holds with its checksums. sqlite3.DatabaseError."""
    with contextlib.closing(rows(database)) as found:  # A selection that goes on would keep the file open.
        for row in found:
            if not row.is_sound:
                raise sqlite3.DatabaseError(unsound(row.path))


def unsound(path: str) -> str:
    """Say that a node is damaged."""
    return f"the node {path} does not fit its checksum"


def make(database: sqlite3.Connection) -> Form:
    """Make the table, with the root, where it is missing; return its form."""
    database.execute(TABLE)
    database.execute(INDEX)
    form = form_of(database)
    database.execute(form.insert.replace("INSERT", "INSERT OR IGNORE"), form.inserted(ROOT, 0, 0, b""))
    return form


def rewrite(database: sqlite3.Connection) -> None:
    """Give a file of an earlier version checksums, in one transaction. sqlite3.Error: it is as it was."""
    database.create_function("node_crc", 4, checksum, deterministic=True)
    database.execute("BEGIN IMMEDIATE")
    try:
        for statement in _REWRITTEN:
            database.execute(statement)
        database.execute("COMMIT")
    except UNREADABLE:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


@dataclass
class Found:
    """The nodes of a file that no broker uses."""

    sound: dict[str, Row]
    damaged: dict[str, Row]
    """Those that do not fit their checksums."""
    is_cut: bool = False
    """Whether the write-ahead log is damaged."""
    is_whole: bool = True
    """Whether all changes are there; if not, the nodes are as they were before the last transactions."""


def read_tree(path: Path, *, power_lost: bool = False) -> Found | None:
    """Read all nodes of a file that no broker uses; None where it is missing, empty or no sound database. Blocks.

    None, too, where the write-ahead log is damaged, and the file may have some changes of those that are lost.
    `power_lost`: the machine was restarted since the file was in use.
    """
    if odd_file(path) is not None or not (path.exists() and path.stat().st_size):
        return None
    try:
        check_log(path)
    except UNREADABLE:
        return _read_cut(path, power_lost=power_lost)
    return _read(path)


def _read(path: Path) -> Found | None:
    found = Found({}, {})
    try:
        check_header(path)
        # Without a log to read, it is read as it is: SQLite would make files beside it.
        mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else _ALONE
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as database:
            for row in rows(database):
                (found.sound if row.is_sound else found.damaged)[row.path] = row
    except UNREADABLE:
        return None
    return found


def changes_of(path: Path) -> int | None:
    """Read how many changes a file without a write-ahead log has seen, which no broker uses. Blocks.

    None where that cannot be read.
    """
    if odd_file(path) is not None:
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{_ALONE}", uri=True)) as database:
            found = database.execute(f"{form_of(database).select} WHERE path = ?", (ROOT,)).fetchone()
    except UNREADABLE:
        return None
    row = None if found is None else Row(*found)
    return row.version if row is not None and row.is_sound else None


def _read_cut(path: Path, *, power_lost: bool) -> Found | None:
    """Read a file whose write-ahead log is damaged, elsewhere: opened, it would look sound from then on."""
    import shutil
    import tempfile

    from anabranch.storage.metadata import wal

    remains = wal.remains(path, index_is_old=power_lost)
    if remains is wal.Remains.NOTHING:
        return None
    with tempfile.TemporaryDirectory(prefix="anabranch-") as name:
        other = Path(name) / path.name
        for suffix in ("", "-wal") if remains is wal.Remains.BEFORE else ("",):
            if (file := path.with_name(path.name + suffix)).exists():
                shutil.copyfile(file, other.with_name(other.name + suffix))
        found = _read(other)
    if found is not None:
        found.is_cut, found.is_whole = True, remains is wal.Remains.ALL
    return found


def write_tree(path: Path, tree: Iterable[Row]) -> None:
    """Write a file of these nodes, and no others, durably. Blocks; OSError."""
    for suffix in ("", "-journal"):  # That of a run that was interrupted would be applied to this file.
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    with _changed(path) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute(TABLE)
        database.execute(INDEX)
        session = 0
        for row in tree:
            database.execute(CURRENT.insert, CURRENT.inserted(row.path, row.version, row.session, row.data))
            session = max(session, row.session)
        database.execute(f"PRAGMA user_version = {session}")
        database.execute("COMMIT")


@contextlib.contextmanager
def _changed(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("PRAGMA synchronous = FULL")
            yield database
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"{path} cannot be written: {error}") from error
