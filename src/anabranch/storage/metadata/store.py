"""The metadata store's interface: a tree of small versioned nodes, as ZooKeeper has it (storage.md, section 1).

A node has bytes, a version that starts at 0 and grows by one with every `set`, and children. A change may be made
conditional on the version that was read. `multi` makes several changes or none. An ephemeral node has no children, and
goes when the session that made it ends. A watch is called once, after a change is durable; whoever wants to know more
asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from anabranch.base.errors import AnabranchError

ANY_VERSION = -1


class MetadataError(AnabranchError):
    """A change or a read that the tree does not allow; the path is in the text."""


class NoNodeError(MetadataError):
    """There is no node at that path, or none above the one to create."""


class NodeExistsError(MetadataError):
    """There is a node at that path already."""


class BadVersionError(MetadataError):
    """The node has changed since it was read."""


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
    """Make a node; the one above it must exist."""

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
    """Only go on if a node exists, at `version` where one is given."""

    path: str
    version: int = ANY_VERSION


Operation = Create | Set | Delete | Check
Watch = Callable[[str, Change], None]


class MetadataStore(Protocol):
    """One session on the tree. Every method may raise OSError; then nothing has changed."""

    session: int
    """Its number, which no other session ever has."""

    def get(self, path: str) -> tuple[bytes, int]:
        """Read a node's bytes and version; NoNodeError."""

    def exists(self, path: str) -> bool:
        """Whether there is a node."""

    def owner(self, path: str) -> int | None:
        """The session that an ephemeral node belongs to, None for a lasting node; NoNodeError."""

    def children(self, path: str) -> Sequence[str]:
        """Read the names of a node's children, sorted; NoNodeError."""

    def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        """Make a node, durably; NodeExistsError, or NoNodeError when there is none above it."""

    def ensure(self, path: str) -> None:
        """Make a node, and those above it, where they are missing."""

    def set(self, path: str, data: bytes, expected_version: int = ANY_VERSION) -> int:
        """Give a node new bytes, durably, and answer its new version; NoNodeError, BadVersionError."""

    def delete(self, path: str, expected_version: int = ANY_VERSION) -> None:
        """Remove a node, durably; NoNodeError, BadVersionError, NotEmptyError."""

    def multi(self, operations: Sequence[Operation]) -> None:
        """Make all of these changes, in order, or none; the first that cannot be made raises its error."""

    def watch(self, path: str, watch: Watch) -> None:
        """Call `watch` once when the node is created, changed or deleted, or its children come or go."""

    def close(self) -> None:
        """End the session: its ephemeral nodes go."""
