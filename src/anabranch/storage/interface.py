"""The interfaces of the two stores, all that the server knows of them (storage.md).

`MetadataStore` is a tree of small versioned nodes, as ZooKeeper has it. A node has bytes, a version that starts at 0
and grows by one with every `set`, and children. A change may be made conditional on the version that was read. An
ephemeral node has no children, and goes when the session that made it ends. A watch is called once, after a change is
durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from anabranch.base.errors import AnabranchError

ANY_VERSION = -1


class MetadataError(AnabranchError):
    """A change or a read that the tree does not allow; the path is in the text."""


class NoNodeError(MetadataError):
    """No node has that path, or none has the path above the one to create."""


class NodeExistsError(MetadataError):
    """A node has that path already."""


class BadVersionError(MetadataError):
    """The node has another version than was expected: it changed since it was read."""


class NotEmptyError(MetadataError):
    """The node has children and cannot be deleted."""


class Change(Enum):
    """What a watch reports."""

    CREATED = "created"
    CHANGED = "changed"
    DELETED = "deleted"
    CHILDREN = "children"


@dataclass(frozen=True, slots=True)
class Create:
    """Make a node; its parent must exist."""

    path: str
    data: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    """Give a node new bytes."""

    path: str
    data: bytes
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a node without children."""

    path: str
    version: int = ANY_VERSION


@dataclass(frozen=True, slots=True)
class Check:
    """Change nothing, but require that a node exists, at `version` where one is given."""

    path: str
    version: int = ANY_VERSION


class Node(NamedTuple):
    """One node of a tree that was read."""

    path: str
    data: bytes
    version: int


Operation = Create | Set | Delete | Check
Watch = Callable[[str, Change], None]
"""Called in the event loop with the path and what happened to its node; it must not await nor raise."""


class MetadataStore(Protocol):
    """One session on the tree, used within one event loop.

    Operations take effect in the order in which they were called. Every one of them may raise OSError: then nothing has
    changed. A caller that is cancelled while it awaits a change does not know whether the change is made.
    """

    session: int
    """The session's number, which no other session ever has."""

    async def get(self, path: str) -> tuple[bytes, int]:
        """Read a node's bytes and version; NoNodeError."""

    async def exists(self, path: str) -> bool:
        """Tell whether a node has this path."""

    async def existing(self, paths: Iterable[str]) -> frozenset[str]:
        """Choose the paths that have a node: one answer about many paths."""

    async def owner(self, path: str) -> int | None:
        """Read the session that an ephemeral node belongs to, None for a lasting node; NoNodeError."""

    async def children(self, path: str) -> Sequence[str]:
        """Read the names of a node's children, sorted; NoNodeError."""

    async def subtree(self, path: str) -> Sequence[Node]:
        """Read a node and all nodes below it, parents before their children; nothing where no node has this path."""

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        """Make a node, durably; NodeExistsError, or NoNodeError where its parent is missing."""

    async def ensure(self, path: str) -> None:
        """Make a node, and those above it, where they are missing."""

    async def set(self, path: str, data: bytes, expected_version: int = ANY_VERSION) -> int:
        """Give a node new bytes, durably, and return its new version; NoNodeError, BadVersionError."""

    async def delete(self, path: str, expected_version: int = ANY_VERSION) -> None:
        """Remove a node, durably; NoNodeError, BadVersionError, NotEmptyError."""

    async def multi(self, operations: Sequence[Operation]) -> None:
        """Make all of these changes, in order, or none; the first that cannot be made raises its error."""

    def watch(self, path: str, watch: Watch) -> None:
        """Call `watch` once when the node is created, changed or deleted, or its children come or go.

        A change whose operation was called before `watch` was may be reported, too.
        """

    async def close(self) -> None:
        """End the session after the operations that were called before; its ephemeral nodes go."""


def check_path(path: str) -> None:
    """MetadataError where `path` is not a path."""
    if not path.startswith("/") or path.endswith("/") or "//" in path:
        raise MetadataError(f"{path!r} is not a path: expected /name/name, without a slash at the end.")


def parent_of(path: str) -> str:
    """Name the node above the one at `path`."""
    return path.rpartition("/")[0] or "/"
