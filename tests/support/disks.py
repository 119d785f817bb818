"""A disk in memory with the failures of real ones: lost and torn writes, full disks, lying syncs, flipped bits.

Every file has the bytes that programs see and the bytes that are safe. A power loss (`crash`) returns the disk in the
state of the next start: of all unsynced changes (sectors of files, names of files, directories) a random part
survives. A failed sync may have saved anything or nothing, and the next sync does not retry the unsaved rest; only a
truncation is always remembered (file systems keep a journal of sizes).
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from anabranch.runtime.disk import SMALL_SIZE_MAX, DirectoryLock, Disk, File

SECTOR = 64


class Node:
    """The content of a file: as seen, as it is safe, and the changes between the two (`(size, b"")` cuts)."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.safe = bytearray()
        self.pending: list[tuple[int, bytes]] = []


class MemoryFile(File):
    """A file of a `FaultyDisk`."""

    __slots__ = ("_disk", "_node")

    def __init__(self, disk: FaultyDisk, node: Node, path: Path) -> None:
        super().__init__(path, -1)
        self._disk = disk
        self._node = node

    def size(self) -> int:
        return len(self._node.data)

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        self._disk.write(self._node, bytes(data), position)

    def read(self, size: int, position: int) -> bytes:
        return bytes(self._node.data[position : position + size])

    def data_from(self, position: int) -> int:
        return position

    def map(self, size: int, position: int) -> memoryview:
        return memoryview(self.read(size, position))

    def truncate(self, size: int) -> None:
        if size != len(self._node.data):
            self._node.data[size:] = bytes(max(0, size - len(self._node.data)))
            self._node.pending.append((size, b""))

    def sync(self) -> None:
        self._disk.sync(self._node)


class FaultyDisk(Disk):
    """Files by path."""

    def __init__(self, seed: int, capacity: int | None = None) -> None:
        self.chance = random.Random(seed)
        self.capacity = capacity
        self.fail_sync = False
        self.boots = 0
        self.syncs = 0
        self.nodes: dict[Path, Node] = {}
        self.safe_names: dict[Path, Node] = {}
        self.renames: list[tuple[Path, Path]] = []
        self.directory_renames: list[tuple[Path, Path]] = []
        self.directories: set[Path] = set()
        self.safe_directories: set[Path] = set()

    @property
    def used(self) -> int:
        return sum(len(node.data) for node in self.nodes.values())

    # -- faults

    def write(self, node: Node, data: bytes, position: int) -> None:
        if self.capacity is not None:
            room = max(0, self.capacity - self.used + max(0, len(node.data) - position))
            if len(data) > room:
                if room:
                    _put(node.data, position, data[:room])
                    node.pending.append((position, data[:room]))
                raise OSError(errno.ENOSPC, "No space left on device")
        _put(node.data, position, data)
        if data:
            node.pending.append((position, data))

    def sync(self, node: Node) -> None:
        self.syncs += 1
        if self.fail_sync:
            self._save_some(node)
            node.pending = [(size, data) for size, data in node.pending if not data]
            raise OSError(errno.EIO, "Input/output error")
        for position, data in node.pending:
            _apply(node.safe, position, data)
        node.pending.clear()

    def crash(self) -> FaultyDisk:
        """Lose the power; answer the disk as it is found afterwards."""
        after = FaultyDisk(self.chance.randrange(2**32), self.capacity)
        after.boots = self.boots + 1
        for old, new in self.directory_renames:
            if self.chance.random() < 0.5:
                self._move_safe(old, new)
            else:
                self.nodes = _moved(self.nodes, new, old)
                self.directories = {_at(path, new, old) for path in self.directories}
        known = sorted(self.directories | self.safe_directories)
        changing = self.directories ^ self.safe_directories
        directories = {path for path in known if path not in changing or self.chance.random() < 0.5}
        names = dict(self.safe_names)
        changed = sorted(set(self.nodes) | set(self.safe_names))
        for old, new in self.renames:
            # A rename is done or not; it never loses both names.
            if self.safe_names.get(old) is self.nodes.get(new) is not None:
                changed = [path for path in changed if path not in (old, new)]
                if self.chance.random() < 0.5:
                    names[new] = names.pop(old)
        for path in changed:
            if self.nodes.get(path) is not self.safe_names.get(path) and self.chance.random() < 0.5:
                names.pop(path, None)
                if path in self.nodes:
                    names[path] = self.nodes[path]
        after.directories = directories
        after.safe_directories = set(directories)
        for path, node in sorted(names.items()):
            if path.parent in directories:
                self._save_some(node)
                found = Node()
                found.data[:] = found.safe[:] = node.safe
                after.nodes[path] = after.safe_names[path] = found
        return after

    def _save_some(self, node: Node) -> None:
        """Make some of the unsynced changes safe, sector by sector."""
        share = self.chance.choice((0.0, 0.5, 0.9, 1.0))
        for position, data in node.pending:
            if not data:
                if self.chance.random() < share:
                    _apply(node.safe, position, data)
                continue
            for start in range(0, len(data), SECTOR):
                if self.chance.random() < share:
                    _put(node.safe, position + start, data[start : start + SECTOR])

    def flip_bit(self, path: Path, position: int) -> None:
        node = self.nodes[path]
        node.data[position] ^= 1 << self.chance.randrange(8)
        node.safe[:] = node.data

    # -- the disk

    def open(self, path: Path, *, create: bool = False) -> File:
        if path not in self.nodes:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
            self.nodes[path] = Node()
        return MemoryFile(self, self.nodes[path], path)

    def read(self, path: Path, size_max: int = SMALL_SIZE_MAX) -> bytes:
        return self.open(path).read(1 << 62, 0)

    def replace(self, path: Path, data: bytes) -> None:
        if self.capacity is not None and self.used + len(data) > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.fail_sync:
            raise OSError(errno.EIO, "Input/output error")
        node = Node()
        node.data[:] = node.safe[:] = data
        self.nodes[path] = node
        self.sync_directory(path.parent)

    def exists(self, path: Path) -> bool:
        return path in self.nodes or path in self.directories

    def names(self, directory: Path) -> Sequence[str]:
        above = f"{directory}/"
        inside = (str(path) for path in (*self.nodes, *self.directories))
        return sorted({path[len(above) :].partition("/")[0] for path in inside if path.startswith(above)})

    def make_directory(self, path: Path) -> None:
        self.directories |= {path, *path.parents}

    def rename(self, old: Path, new: Path) -> None:
        if old in self.directories:
            self.nodes = _moved(self.nodes, old, new)
            self.directories = {_at(path, old, new) for path in self.directories}
            self.directory_renames.append((old, new))
            return
        self.nodes[new] = self.nodes.pop(old)
        self.renames.append((old, new))

    def unlink(self, path: Path) -> None:
        self.nodes.pop(path, None)

    def discard(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self.unlink(path)

    def remove_tree(self, path: Path) -> None:
        self.nodes = {name: node for name, node in self.nodes.items() if not _is_in(name, path)}
        self.directories = {known for known in self.directories if not _is_in(known, path)}

    def free(self, path: Path) -> int:
        return 1 << 40 if self.capacity is None else self.capacity - self.used

    def reserve(self, path: Path, size: int) -> None:
        pass

    def boot_id(self) -> bytes | None:
        return str(self.boots).encode()

    def lock(self, path: Path, locked: Callable[[], None] | None = None) -> DirectoryLock:
        if locked is not None:
            locked()
        return _NoLock()

    def sync_directory(self, path: Path) -> None:
        self.syncs += 1
        if self.fail_sync:
            raise OSError(errno.EIO, "Input/output error")
        for old, new in self.directory_renames:
            if old.parent == path:
                self._move_safe(old, new)
        self.directory_renames = [pair for pair in self.directory_renames if pair[0].parent != path]
        self.renames = [pair for pair in self.renames if pair[0].parent != path]
        for known in [known for known in self.safe_names if known.parent == path]:
            del self.safe_names[known]
        self.safe_names.update({name: node for name, node in self.nodes.items() if name.parent == path})
        gone = {known for known in self.safe_directories - self.directories if known.parent == path}
        self.safe_directories -= gone
        self.safe_directories |= {known for known in self.directories if known.parent == path}

    def _move_safe(self, old: Path, new: Path) -> None:
        self.safe_names = _moved(self.safe_names, old, new)
        self.safe_directories = {_at(path, old, new) for path in self.safe_directories}


class _NoLock(DirectoryLock):
    """The lock of a disk that has one user."""

    def __init__(self) -> None:
        pass

    def release(self) -> None:
        pass


def _is_in(path: Path, directory: Path) -> bool:
    return path == directory or str(path).startswith(f"{directory}/")


def _at(path: Path, old: Path, new: Path) -> Path:
    """Where a path is when the directory `old` is called `new`."""
    return new / path.relative_to(old) if _is_in(path, old) else path


def _moved(nodes: dict[Path, Node], old: Path, new: Path) -> dict[Path, Node]:
    return {_at(path, old, new): node for path, node in nodes.items()}


def _put(target: bytearray, position: int, data: bytes) -> None:
    target.extend(bytes(max(0, position - len(target))))
    target[position : position + len(data)] = data


def _apply(target: bytearray, position: int, data: bytes) -> None:
    if data:
        _put(target, position, data)
    else:
        target[position:] = bytes(max(0, position - len(target)))
