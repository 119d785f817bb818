"""A metadata store in memory, for simulators: the tree outlives the sessions on it, as an ensemble outlives a broker.

`pause` is awaited before and after every change takes effect: there a simulator delays, refuses (OSError before the
change), or kills the session's process. Sessions do not see each other's pauses; operations of one keep their order.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Sequence

from anabranch.storage.interface import (
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
    StoredNode,
    Watch,
    check_path,
    parent_of,
)


class _Entry:
    __slots__ = ("children", "data", "owner", "version")

    def __init__(self, data: bytes = b"", owner: int | None = None) -> None:
        self.data = data
        self.version = 0
        self.owner = owner
        self.children: set[str] = set()


class MemoryTree:
    """The nodes, independent of sessions. `expire` a session of a dead process."""

    def __init__(self) -> None:
        self.nodes: dict[str, _Entry] = {"/": _Entry()}
        self.watches: dict[str, list[tuple[int, Watch]]] = {}
        self._sessions = itertools.count(1)

    def session(self) -> int:
        return next(self._sessions)

    def entry(self, path: str) -> _Entry:
        found = self.nodes.get(path)
        if found is None:
            raise NoNodeError(f"There is no node {path}.")
        return found

    def expire(self, session: int) -> None:
        """End a session: its watches and its ephemeral nodes go."""
        for path, watches in list(self.watches.items()):
            self.watches[path] = [watch for watch in watches if watch[0] != session]
        self.change([Delete(path) for path, entry in self.nodes.items() if entry.owner == session], session)

    def change(self, operations: Sequence[Operation], session: int) -> None:
        """Make all changes or none, then call the watches."""
        undo: list[Callable[[], object]] = []
        happened: list[tuple[str, Change]] = []
        try:
            for operation in operations:
                happened += self._make(operation, session, undo)
        except BaseException:
            for step in reversed(undo):
                step()
            raise
        for path, change in happened:
            for _, watch in self.watches.pop(path, ()):
                watch(path, change)

    def _make(self, operation: Operation, session: int, undo: list[Callable[[], object]]) -> list[tuple[str, Change]]:
        path, parent, nodes = operation.path, parent_of(operation.path), self.nodes
        check_path(path)
        if isinstance(operation, Create):
            if path in nodes:
                raise NodeExistsError(f"There is a node {path} already.")
            above = self.entry(parent)
            if above.owner is not None:
                raise MetadataError(f"The node {parent} is ephemeral: it cannot have children.")
            nodes[path] = _Entry(operation.data, session if operation.ephemeral else None)
            above.children.add(path)
            undo += [lambda: nodes.pop(path), lambda: above.children.discard(path)]
            return [(path, Change.CREATED), (parent, Change.CHILDREN)]
        entry = self.entry(path)
        if operation.version not in (ANY_VERSION, entry.version):
            raise BadVersionError(f"The node {path} is at version {entry.version}, not at {operation.version}.")
        match operation:
            case Check():
                return []
            case Set():
                before = entry.data, entry.version

                def put_back() -> None:
                    entry.data, entry.version = before

                undo.append(put_back)
                entry.data, entry.version = operation.data, entry.version + 1
                return [(path, Change.CHANGED)]
            case Delete():
                if entry.children:
                    raise NotEmptyError(f"The node {path} has children.")
                above = self.entry(parent)
                del nodes[path]
                above.children.discard(path)
                undo += [lambda: nodes.__setitem__(path, entry), lambda: above.children.add(path)]
                return [(path, Change.DELETED), (parent, Change.CHILDREN)]


async def _no_pause() -> None:
    await asyncio.sleep(0)


class MemoryMetadataStore:
    """One session on a tree in memory."""

    def __init__(self, tree: MemoryTree, pause: Callable[[], Awaitable[None]] = _no_pause) -> None:
        self.session = tree.session()
        self._tree = tree
        self._pause = pause
        self._turn = asyncio.Lock()

    async def get(self, path: str) -> tuple[bytes, int]:
        async with self._turn:
            entry = self._tree.entry(path)
            return entry.data, entry.version

    async def exists(self, path: str) -> bool:
        return bool(await self.existing([path]))

    async def existing(self, paths: Collection[str]) -> frozenset[str]:
        async with self._turn:
            return frozenset(path for path in paths if path in self._tree.nodes)

    async def owner(self, path: str) -> int | None:
        async with self._turn:
            return self._tree.entry(path).owner

    async def children(self, path: str) -> Sequence[str]:
        async with self._turn:
            return sorted(child.rpartition("/")[2] for child in self._tree.entry(path).children)

    async def subtree(self, path: str) -> Sequence[StoredNode]:
        async with self._turn:
            nodes, below = self._tree.nodes, path.rstrip("/") + "/"
            found = sorted(other for other in nodes if other == path or other.startswith(below))
            return [StoredNode(each, nodes[each].data, nodes[each].version) for each in found]

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        await self.multi([Create(path, data, ephemeral)])

    async def ensure(self, path: str) -> None:
        names = path.strip("/").split("/")
        paths = itertools.accumulate(names, lambda above, name: f"{above}/{name}", initial="")
        await self._change(lambda: [Create(each) for each in paths if each and each not in self._tree.nodes])

    async def set(self, path: str, data: bytes, expected_version: int = ANY_VERSION) -> int:
        version = -1

        def note_version() -> None:
            nonlocal version
            version = self._tree.entry(path).version

        await self._change(lambda: [Set(path, data, expected_version)], note_version)
        return version

    async def delete(self, path: str, expected_version: int = ANY_VERSION) -> None:
        await self.multi([Delete(path, expected_version)])

    async def multi(self, operations: Sequence[Operation]) -> None:
        await self._change(lambda: operations)

    def watch(self, path: str, watch: Watch) -> None:
        self._tree.watches.setdefault(path, []).append((self.session, watch))

    async def close(self) -> None:
        async with self._turn:
            self._tree.expire(self.session)

    async def _change(
        self, operations: Callable[[], Sequence[Operation]], then: Callable[[], None] = lambda: None
    ) -> None:
        async with self._turn:
            await self._pause()
            self._tree.change(operations(), self.session)
            then()
            await self._pause()
