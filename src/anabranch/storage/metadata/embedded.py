"""The metadata store in one SQLite file: write-ahead log, every commit synced before it is answered.

One broker process owns the file, and each opening of it is a session. Ephemeral nodes belong to the session that wrote
them; those of sessions that died are removed when the next one opens. Watches are called in this process, after the
commit, in the order of the changes. What SQLite cannot do (disk full, input/output error, somebody else holds the file)
is an OSError, and then nothing has changed.
"""

from __future__ import annotations

import errno
import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anabranch.storage.metadata.store import (
    ANY_VERSION,
    BadVersionError,
    Change,
    Check,
    Create,
    Delete,
    MetadataError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    Operation,
    Set,
    Watch,
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS node (
    path TEXT PRIMARY KEY,
    parent TEXT NOT NULL,
    data BLOB NOT NULL,
    version INTEGER NOT NULL,
    ephemeral INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS node_parent ON node (parent);
INSERT OR IGNORE INTO node VALUES ('/', '', x'', 0, 0);
"""
BUSY_TIMEOUT_S = 5.0
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
}
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class EmbeddedMetadataStore:
    """The tree in a SQLite file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watches: dict[str, list[Watch]] = {}
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.executescript(_SCHEMA)
            last = self._connection.execute("PRAGMA user_version").fetchone()[0]
            self.session = int(last) + 1
            """The number of this session, which no other ever has."""
            self._connection.execute(f"PRAGMA user_version = {self.session}")
        except sqlite3.Error as error:
            self._connection.close()
            raise self._refused(error) from error
        self._drop_ephemeral_nodes()

    def get(self, path: str) -> tuple[bytes, int]:
        """Read a node's bytes and version; NoNodeError."""
        rows = self._execute("SELECT data, version FROM node WHERE path = ?", path)
        if not rows:
            raise NoNodeError(f"There is no node {path}.")
        return bytes(rows[0][0]), int(rows[0][1])

    def exists(self, path: str) -> bool:
        """Whether there is a node."""
        return bool(self._execute("SELECT 1 FROM node WHERE path = ?", path))

    def owner(self, path: str) -> int | None:
        """The session that an ephemeral node belongs to, None for a lasting node; NoNodeError."""
        rows = self._execute("SELECT ephemeral FROM node WHERE path = ?", path)
        if not rows:
            raise NoNodeError(f"There is no node {path}.")
        return int(rows[0][0]) or None

    def children(self, path: str) -> Sequence[str]:
        """Read the names of a node's children, sorted; NoNodeError."""
        if not self.exists(path):
            raise NoNodeError(f"There is no node {path}.")
        rows = self._execute("SELECT path FROM node WHERE parent = ? ORDER BY path", path)
        return [row[0].rpartition("/")[2] for row in rows]

    def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        """Make a node, durably; NodeExistsError, or NoNodeError when there is none above it."""
        self.multi([Create(path, data, ephemeral)])

    def ensure(self, path: str) -> None:
        """Make a node, and those above it, where they are missing."""
        parts = path.strip("/").split("/")
        paths = itertools.accumulate(parts, lambda above, name: f"{above}/{name}", initial="")
        missing = [Create(node) for node in paths if node and not self.exists(node)]
        if missing:
            self.multi(missing)

    def set(self, path: str, data: bytes, expected_version: int = ANY_VERSION) -> int:
        """Give a node new bytes, durably, and answer its new version; NoNodeError, BadVersionError."""
        self.multi([Set(path, data, expected_version)])
        return self.get(path)[1]

    def delete(self, path: str, expected_version: int = ANY_VERSION) -> None:
        """Remove a node, durably; NoNodeError, BadVersionError, NotEmptyError."""
        self.multi([Delete(path, expected_version)])

    def multi(self, operations: Sequence[Operation]) -> None:
        """Make all of these changes, in order, or none; the first that cannot be made raises its error."""
        changes: list[tuple[str, Change]] = []
        with self._transaction():
            for operation in operations:
                changes += self._perform(operation)
        for path, change in changes:
            for watch in self._watches.pop(path, ()):
                watch(path, change)

    def watch(self, path: str, watch: Watch) -> None:
        """Call `watch` once when the node is created, changed or deleted, or its children come or go."""
        self._watches.setdefault(path, []).append(watch)

    def close(self) -> None:
        """End the session: its ephemeral nodes go."""
        self._drop_ephemeral_nodes()
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._execute("ROLLBACK")
            raise

    def _execute(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def _refused(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _DAMAGED:
            return MetadataError(
                f"{self._path} is damaged ({error}). Restore it from a copy, or begin with a new data directory."
            )
        return OSError(_ERRNO.get(code, errno.EIO), f"the metadata store refuses: {error}", str(self._path))

    def _perform(self, operation: Operation) -> list[tuple[str, Change]]:
        path = operation.path
        _check_path(path)
        parent = path.rpartition("/")[0] or "/"
        match operation:
            case Create(_, data, ephemeral):
                if not self.exists(parent):
                    raise NoNodeError(f"There is no node {parent} to create {path} in.")
                if self.exists(path):
                    raise NodeExistsError(f"There is a node {path} already.")
                if self.owner(parent) is not None:
                    raise MetadataError(f"The node {parent} is ephemeral: it cannot have children.")
                owner = self.session if ephemeral else 0
                self._execute("INSERT INTO node VALUES (?, ?, ?, 0, ?)", path, parent, data, owner)
                return [(path, Change.CREATED), (parent, Change.CHILDREN)]
            case Set(_, data, version):
                self._expect(path, version)
                self._execute("UPDATE node SET data = ?, version = version + 1 WHERE path = ?", data, path)
                return [(path, Change.CHANGED)]
            case Delete(_, version):
                self._expect(path, version)
                if self.children(path):
                    raise NotEmptyError(f"The node {path} has children: {', '.join(self.children(path)[:5])}.")
                self._execute("DELETE FROM node WHERE path = ?", path)
                return [(path, Change.DELETED), (parent, Change.CHILDREN)]
            case Check(_, version):
                self._expect(path, version)
                return []

    def _expect(self, path: str, version: int) -> None:
        found = self.get(path)[1]
        if version not in (ANY_VERSION, found):
            raise BadVersionError(f"The node {path} is at version {found}, not at {version}: it has changed since.")

    def _drop_ephemeral_nodes(self) -> None:
        gone = [Delete(row[0]) for row in self._execute("SELECT path FROM node WHERE ephemeral <> 0")]
        if gone:
            self.multi(gone)


def _check_path(path: str) -> None:
    if not path.startswith("/") or path.endswith("/") or "//" in path:
        raise MetadataError(f"{path!r} is not a path: expected /name/name, without a slash at the end.")
