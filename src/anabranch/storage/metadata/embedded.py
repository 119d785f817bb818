"""The metadata store in one SQLite file: write-ahead log, every commit synced before it is answered.

One broker process owns the file, and each opening of it is a session. Ephemeral nodes belong to the session that wrote
them; those of sessions that died are removed when the next one opens. SQLite works in a thread of its own, one
operation after the other, so that no operation blocks the event loop. Watches are called in the loop, after the commit,
in the order of the changes. What SQLite cannot do (disk full, input/output error, a file that another process holds) is
an OSError, and then nothing has changed.

Every node has a checksum, and each reading of a node compares it (`table`). A file with a damaged node is not opened; a
change that meets one later fails, and the others go on.

The bytes of a node lie beside the index of paths, not in it. The node of a topic has a megabyte where the topic has
100,000 partitions, and SQLite reads an entry of an index whole to compare it: in an index every operation on a
partition would read that megabyte.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from anabranch.runtime.loop_steps import timed
from anabranch.storage.interface import (
    ANY_VERSION,
    BadVersionError,
    Change,
    Check,
    Create,
    DamagedMetadataError,
    Delete,
    MetadataError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    Operation,
    Set,
    StoredNode,
    Watch,
    check_path,
    parent_of,
)
from anabranch.storage.metadata import table
from anabranch.storage.metadata.table import ROOT, UNREADABLE, Row

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Happened = list[tuple[str, Change]]
Paths = set[str]

_DELETE = f"""
DELETE FROM node
WHERE path = ? AND (? = {ANY_VERSION} OR version = ?)
  AND NOT EXISTS (SELECT 1 FROM node AS child WHERE child.parent = ?)
"""
BUSY_TIMEOUT_S = 5.0
ASKED_AT_A_TIME = 2_000
"""Paths that are asked for at once: to make one text of 100,000 keeps all other threads waiting for 100 ms."""
FREED_APART_MIN = 10_000
"""Events of a change that are freed in a thread: a millisecond."""
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
}
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""The statements are constants: one that is an error finds a table or a column that has another name."""


class EmbeddedMetadataStore:
    """The tree in a SQLite file. Use `EmbeddedMetadataStore.open`; `close` it within the same event loop."""

    def __init__(self, database: _Database, thread: ThreadPoolExecutor) -> None:
        self.session = database.session
        self._database = database
        self._thread = thread
        self._watches: dict[str, list[Watch]] = {}
        self._closed = False
        self._copied = 0
        """The number of the last change that is in the copy."""

    @classmethod
    async def open(cls, path: Path) -> EmbeddedMetadataStore:
        """Begin a session on the tree in the file at `path`, made if it is missing. OSError, MetadataError."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="metadata")
        try:
            database = await asyncio.get_running_loop().run_in_executor(thread, _Database, path)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(database, thread)

    async def get(self, path: str) -> tuple[bytes, int]:
        """Read a node's bytes and version; NoNodeError."""
        return await self._run(self._database.get, path)

    async def exists(self, path: str) -> bool:
        """Return whether a node has this path."""
        return await self._run(self._database.exists, path)

    async def existing(self, paths: Collection[str]) -> frozenset[str]:
        """Choose the paths that have a node."""
        return await self._run(self._database.existing, paths)

    async def owner(self, path: str) -> int | None:
        """Read the session that an ephemeral node belongs to, None for a lasting node; NoNodeError."""
        return await self._run(self._database.owner, path)

    async def children(self, path: str) -> Sequence[str]:
        """Read the names of a node's children, sorted; NoNodeError."""
        return await self._run(self._database.children, path)

    async def subtree(self, path: str) -> Sequence[StoredNode]:
        """Read a node and all nodes below it, parents before their children; nothing where no node has this path."""
        return await self._run(self._database.subtree, path)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        """Make a node, durably; NodeExistsError, or NoNodeError where its parent is missing."""
        await self.multi([Create(path, data, ephemeral)])

    async def ensure(self, path: str) -> None:
        """Make a node, and those above it, where they are missing."""
        await self._change(self._database.ensure, path)

    async def set(self, path: str, data: bytes, expected_version: int = ANY_VERSION) -> int:
        """Give a node new bytes, durably, and return its new version; NoNodeError, BadVersionError."""
        return await self._change(self._database.set, path, data, expected_version)

    async def delete(self, path: str, expected_version: int = ANY_VERSION) -> None:
        """Remove a node, durably; NoNodeError, BadVersionError, NotEmptyError."""
        await self.multi([Delete(path, expected_version)])

    async def multi(self, operations: Sequence[Operation]) -> None:
        """Make all of these changes, in order, or none; the first that cannot be made raises its error."""
        await self._change(self._database.multi, operations)

    async def copy_to(self, path: Path) -> None:
        """Keep a copy of the tree in the file at `path`, durably, if it has changed since the last one. OSError."""
        changes = self._database.changes
        if changes != self._copied:
            await asyncio.get_running_loop().run_in_executor(None, self._database.copy_to, path)
            self._copied = changes

    def watch(self, path: str, watch: Watch) -> None:
        """Call `watch` once when the node is created, changed or deleted, or its children come or go."""
        self._watches.setdefault(path, []).append(watch)

    async def close(self) -> None:
        """End the session: its ephemeral nodes go."""
        if not self._closed:
            self._closed = True
            closed = asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
            closed.add_done_callback(lambda _: self._thread.shutdown(wait=False))
            await asyncio.shield(closed)

    def _begin(self, work: Callable[[*Ts], T], *arguments: *Ts) -> asyncio.Future[T]:
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "the metadata store is closed")
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _run(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await self._begin(work, *arguments)

    async def _change(self, work: Callable[[*Ts], tuple[int, Happened]], *arguments: *Ts) -> int:
        """Make a change to its end, and call the watches, whatever becomes of the caller; the last node's version."""
        change = self._begin(work, *arguments)
        loop = asyncio.get_running_loop()
        change.add_done_callback(timed(loop, "metadata", self._call_watches))
        try:
            version, happened = await asyncio.shield(change)
        finally:
            del change  # Or what it failed with holds this frame, and the frame holds it.
        if len(happened) >= FREED_APART_MIN:
            loop.run_in_executor(None, happened.clear)
        return version

    def _call_watches(self, change: asyncio.Future[tuple[int, Happened]]) -> None:
        if change.cancelled() or change.exception() is not None or not self._watches:
            return
        for path, happened in change.result()[1]:
            for watch in self._watches.pop(path, ()):
                watch(path, happened)


class _Database:
    """The tree in a SQLite file. Every method blocks; after its making, one thread calls everything.

    A change returns the version of the last node that it wrote, and the events of its paths, in order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copying = threading.Lock()
        """A stop copies, too, perhaps beside a copy that was begun before."""
        self.changes = 1
        """Grows with every change."""
        try:
            table.check_log(path)  # Before SQLite opens it: it takes back what follows damage, and says nothing.
        except UNREADABLE as error:
            raise self._refused(error) from error
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S)
        try:
            table.check_header(path)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            last = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
            if last or self._connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                table.check(self._connection)  # Before anything in the file is changed.
            self._form = table.make(self._connection)
            self._made = self._row(ROOT).version
            """The changes that the tree has seen. Its root is not read again: a damaged one must hold up no change."""
            self.session = last + 1
            self._connection.execute(f"PRAGMA user_version = {self.session}")
        except UNREADABLE as error:
            self._connection.close()
            raise self._refused(error) from error
        self._give_checksums()
        self._drop_ephemeral_nodes()

    def get(self, path: str) -> tuple[bytes, int]:
        row = self._row(path)
        return row.data, row.version

    def exists(self, path: str) -> bool:
        return bool(self._execute("SELECT 1 FROM node WHERE path = ?", path))

    def existing(self, paths: Collection[str]) -> frozenset[str]:
        asked, found = [*paths], set[str]()
        for first in range(0, len(asked), ASKED_AT_A_TIME):
            some = json.dumps(asked[first : first + ASKED_AT_A_TIME])
            rows = self._execute("SELECT path FROM node WHERE path IN (SELECT value FROM json_each(?))", some)
            found.update(row[0] for row in rows)
        return frozenset(found)

    def owner(self, path: str) -> int | None:
        rows = self._execute("SELECT ephemeral FROM node WHERE path = ?", path)
        if not rows:
            raise NoNodeError(f"There is no node {path}.")
        return int(rows[0][0]) or None

    def children(self, path: str) -> Sequence[str]:
        if not self.exists(path):
            raise NoNodeError(f"There is no node {path}.")
        rows = self._execute("SELECT path FROM node WHERE parent = ? ORDER BY path", path)
        return [row[0].rpartition("/")[2] for row in rows]

    def subtree(self, path: str) -> Sequence[StoredNode]:
        below = path.rstrip("/")
        found = self._execute(
            f"{self._form.select} WHERE path = ? OR (path > ? AND path < ?) ORDER BY path",
            path,
            f"{below}/",
            f"{below}0",  # The character that follows the slash.
        )
        return [StoredNode(row.path, row.data, row.version) for row in map(self._sound, found)]

    def ensure(self, path: str) -> tuple[int, Happened]:
        parts = path.strip("/").split("/")
        paths = itertools.accumulate(parts, lambda above, name: f"{above}/{name}", initial="")
        return self.multi([Create(node) for node in paths if node and not self.exists(node)])

    def set(self, path: str, data: bytes, expected_version: int) -> tuple[int, Happened]:
        return self.multi([Set(path, data, expected_version)])

    def multi(self, operations: Sequence[Operation]) -> tuple[int, Happened]:
        changes: Happened = []
        version = 0
        if operations:
            lasting: Paths = set()
            with self._transaction():
                for operation in operations:
                    if isinstance(operation, Set):
                        version = self._set(operation)
                        changes.append((operation.path, Change.CHANGED))
                    else:
                        changes += self._perform(operation, lasting)
                if changes:
                    self._execute(self._form.update, *self._form.updated(ROOT, self._made + 1, 0, b""))
            self._made += bool(changes)
            self.changes += 1
        return version, changes

    def copy_to(self, path: Path) -> None:
        """Copy the tree into the file at `path`, which is replaced as a whole. Any thread; blocks; OSError.

        A tree that is damaged on the disk does not replace a copy of it as it was.
        """
        temporary = path.with_name(path.name + ".tmp")
        with self._copying:
            temporary.unlink(missing_ok=True)
            try:
                source, copy = sqlite3.connect(self._path), sqlite3.connect(temporary)
                with contextlib.closing(source), contextlib.closing(copy):
                    source.backup(copy)
                    table.check(copy)
            except UNREADABLE as error:
                raise self._refused(error) from error
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)

    def close(self) -> None:
        try:
            with contextlib.suppress(OSError):  # The next session drops them where this one cannot write.
                self._drop_ephemeral_nodes()
        finally:
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

    def _give_checksums(self) -> None:
        """Rewrite a file of an earlier version; one that cannot be rewritten, as on a full disk, is used as it is."""
        if self._form is table.EARLIER:
            with contextlib.suppress(*UNREADABLE):
                table.rewrite(self._connection)
                self._form = table.CURRENT

    def _row(self, path: str) -> Row:
        found = self._execute(f"{self._form.select} WHERE path = ?", path)
        if not found:
            raise NoNodeError(f"There is no node {path}.")
        return self._sound(found[0])

    def _sound(self, values: tuple[Any, ...]) -> Row:
        row = Row(*values)
        if not row.is_sound:
            raise self._refused(sqlite3.DatabaseError(table.unsound(row.path)))
        return row

    def _execute(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except UNREADABLE as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> Exception:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _DAMAGED or type(error) is sqlite3.DatabaseError:
            return DamagedMetadataError(
                f"{self._path} is damaged ({error}). Restore it from a copy, as `anabranch repair` does."
            )
        return OSError(_ERRNO.get(code, errno.EIO), f"the metadata store refuses: {error}", str(self._path))

    def _set(self, operation: Set) -> int:
        """Give a node new bytes; its new version."""
        check_path(operation.path)
        return self._give(self._expect(operation.path, operation.version), operation.data)

    def _give(self, row: Row, data: bytes) -> int:
        """Write a node anew with these bytes; its new version."""
        version = row.version + 1
        self._execute(self._form.update, *self._form.updated(row.path, version, row.session, data))
        return version

    def _perform(self, operation: Create | Delete | Check, lasting: Paths) -> Happened:
        """Make one change; `lasting`: nodes that are known to be there, and not ephemeral."""
        path = operation.path
        check_path(path)
        parent = parent_of(path)
        match operation:
            case Create(_, data, ephemeral):
                if parent not in lasting:
                    if not self.exists(parent):
                        raise NoNodeError(f"There is no node {parent} to create {path} in.")
                    if self.exists(path):
                        raise NodeExistsError(f"There is a node {path} already.")
                    if self.owner(parent) is not None:
                        raise MetadataError(f"The node {parent} is ephemeral: it cannot have children.")
                    lasting.add(parent)
                owner = self.session if ephemeral else 0
                if not self._insert(path, data, owner):
                    raise NodeExistsError(f"There is a node {path} already.")
                if not ephemeral:
                    lasting.add(path)
                return [(path, Change.CREATED), (parent, Change.CHILDREN)]
            case Delete(_, version):
                if not self._changed(_DELETE, path, version, version, path):
                    self._expect(path, version)
                    raise NotEmptyError(f"The node {path} has children: {', '.join(self.children(path)[:5])}.")
                lasting.discard(path)
                return [(path, Change.DELETED), (parent, Change.CHILDREN)]
            case Check(_, version):
                self._expect(path, version)
                return []

    def _insert(self, path: str, data: bytes, owner: int) -> bool:
        """Add a node; False where one of this path is there."""
        try:
            self._connection.execute(self._form.insert, self._form.inserted(path, 0, owner, data))
        except sqlite3.IntegrityError:
            return False
        except UNREADABLE as error:
            raise self._refused(error) from error
        return True

    def _changed(self, sql: str, *values: object) -> bool:
        """Make a change of at most one node; whether it was made."""
        try:
            return self._connection.execute(sql, values).rowcount > 0
        except UNREADABLE as error:
            raise self._refused(error) from error

    def _expect(self, path: str, version: int) -> Row:
        row = self._row(path)
        if version not in (ANY_VERSION, row.version):
            raise BadVersionError(
                f"The node {path} is at version {row.version}, not at {version}: it has changed since."
            )
        return row

    def _drop_ephemeral_nodes(self) -> None:
        gone = [Delete(row[0]) for row in self._execute("SELECT path FROM node WHERE ephemeral <> 0")]
        if gone:
            self.multi(gone)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
