"""A disk in memory that fails as real ones do: it loses what was not synced, tears it, fills up, and flips bits.

Every file has the bytes that programs see and the bytes that are safe; `crash` gives the disk as the next start finds
it: each unsynced write is there, missing or torn, as chance has it, and so is each unsynced name.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from pathlib import Path

from anabranch.runtime.disk import Disk, File


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

    def map(self, size: int, position: int) -> memoryview:
        return memoryview(self.read(size, position))

    def truncate(self, size: int) -> None:
        del self._node.data[size:]
        self._node.pending.append((size, b""))

    def sync(self) -> None:
        self._disk.sync(self._node)


class Node:
    """The content of a file: as seen, as it is safe, and the writes between the two (`(size, b"")` cuts)."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.safe = bytearray()
        self.pending: list[tuple[int, bytes]] = []


class FaultyDisk(Disk):
    """Files by path; directories are whatever their files say."""

    def __init__(self, seed: int, capacity: int | None = None) -> None:
        self.chance = random.Random(seed)
        self.capacity = capacity
        self.fail_sync = False
        self.nodes: dict[Path, Node] = {}
        self.safe_names: dict[Path, Node] = {}

    # -- faults

    def write(self, node: Node, data: bytes, position: int) -> None:
        if self.capacity is not None:
            used = sum(len(other.data) for other in self.nodes.values())
            room = max(0, self.capacity - used + max(0, len(node.data) - position))
            if len(data) > room:
                self._put(node, data[:room], position)
                raise OSError(errno.ENOSPC, "No space left on device")
        self._put(node, data, position)

    def _put(self, node: Node, data: bytes, position: int) -> None:
        node.data.extend(bytes(max(0, position - len(node.data))))
        node.data[position : position + len(data)] = data
        node.pending.append((position, data))

    def sync(self, node: Node) -> None:
        if self.fail_sync:
            raise OSError(errno.EIO, "Input/output error")
        node.safe[:] = node.data
        node.pending.clear()

    def crash(self) -> FaultyDisk:
        """Lose the power; answer the disk as it is found afterwards."""
        after = FaultyDisk(self.chance.randrange(2**32), self.capacity)
        names = dict(self.safe_names)
        for path in set(self.nodes) | set(self.safe_names):
            if self.nodes.get(path) is not self.safe_names.get(path) and self.chance.random() < 0.5:
                names.pop(path, None)
                if path in self.nodes:
                    names[path] = self.nodes[path]
        for path, node in names.items():
            found = Node()
            found.data[:] = node.safe
            for position, data in node.pending:
                lot = self.chance.random()
                if not data:
                    if lot < 0.5:
                        del found.data[position:]
                    continue
                if lot < 0.4:
                    break
                kept = data if lot < 0.7 else data[: self.chance.randrange(len(data) + 1)]
                found.data.extend(bytes(max(0, position - len(found.data))))
                found.data[position : position + len(kept)] = kept
            found.safe[:] = found.data
            after.nodes[path] = after.safe_names[path] = found
        return after

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

    def read(self, path: Path) -> bytes:
        return self.open(path).read(1 << 62, 0)

    def replace(self, path: Path, data: bytes) -> None:
        if self.capacity is not None and sum(len(n.data) for n in self.nodes.values()) + len(data) > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device")
        node = Node()
        node.data[:] = node.safe[:] = data
        self.nodes[path] = self.safe_names[path] = node

    def exists(self, path: Path) -> bool:
        return any(path == other or path in other.parents for other in self.nodes)

    def names(self, directory: Path) -> Sequence[str]:
        return sorted({path.relative_to(directory).parts[0] for path in self.nodes if directory in path.parents})

    def make_directory(self, path: Path) -> None:
        pass

    def rename(self, old: Path, new: Path) -> None:
        self.nodes[new] = self.nodes.pop(old)

    def unlink(self, path: Path) -> None:
        self.nodes.pop(path, None)

    def sync_directory(self, path: Path) -> None:
        if self.fail_sync:
            raise OSError(errno.EIO, "Input/output error")
        for known in [known for known in self.safe_names if known.parent == path]:
            del self.safe_names[known]
        self.safe_names.update({name: node for name, node in self.nodes.items() if name.parent == path})
