"""The metadata store in one SQLite file: write-ahead log, every commit synced before it is answered.

One broker process owns the file. Ephemeral nodes belong to the session that wrote them; those of sessions that died
are removed when the next one opens. Watches are called in this process, after the commit, in the order of the changes.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


class EmbeddedMetadataStore:
    """The tree in a SQLite file at `path`."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.executescript(_SCHEMA)
        self._watches: dict[str, list[Watch]] = {}
        self._drop_ephemeral_nodes()

    def get(self, path: str) -> tuple[bytes, int]:
        """Read a node's bytes and version; NoNodeError."""
        row = self._connection.execute("SELECT data, version FROM node WHERE path = ?", (path,)).fetchone()
        if row is None:
            raise NoNodeError(f"There is no node {path}.")
        return bytes(row[0]), int(row[1])

    def exists(self, path: str) -> bool:
        """Whether there is a node."""
        return self._connection.execute("SELECT 1 FROM node WHERE path = ?", (path,)).fetchone() is not None

    def children(self, path: str) -> Sequence[str]:
        """Read the names of a node's children, sorted; NoNodeError."""
        if not self.exists(path):
            raise NoNodeError(f"There is no node {path}.")
        rows = self._connection.execute("SELECT path FROM node WHERE parent = ? ORDER BY path", (path,))
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
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

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
                values = (path, parent, data, int(ephemeral))
                self._connection.execute("INSERT INTO node VALUES (?, ?, ?, 0, ?)", values)
                return [(path, Change.CREATED), (parent, Change.CHILDREN)]
            case Set(_, data, version):
                self._expect(path, version)
                self._connection.execute("UPDATE node SET data = ?, version = version + 1 WHERE path = ?", (data, path))
                return [(path, Change.CHANGED)]
            case Delete(_, version):
                self._expect(path, version)
                if self.children(path):
                    raise NotEmptyError(f"The node {path} has children: {', '.join(self.children(path)[:5])}.")
                self._connection.execute("DELETE FROM node WHERE path = ?", (path,))
                return [(path, Change.DELETED), (parent, Change.CHILDREN)]
            case Check(_, version):
                self._expect(path, version)
                return []

    def _expect(self, path: str, version: int) -> None:
        found = self.get(path)[1]
        if version not in (ANY_VERSION, found):
            raise BadVersionError(f"The node {path} is at version {found}, not at {version}: it has changed since.")

    def _drop_ephemeral_nodes(self) -> None:
        rows = self._connection.execute("SELECT path FROM node WHERE ephemeral = 1 ORDER BY length(path) DESC")
        gone = [Delete(row[0]) for row in rows.fetchall()]
        if gone:
            self.multi(gone)


def _check_path(path: str) -> None:
    if not path.startswith("/") or path.endswith("/") or "//" in path:
        raise MetadataError(f"{path!r} is not a path: expected /name/name, without a slash at the end.")
