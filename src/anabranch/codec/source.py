"""Python source under construction: lines, indentation, and the values its names stand for.

Shared by the compilers of readers and writers. A run is a sequence of fixed-width values that become one call of one
`struct.Struct`; emitting a branch or a loop flushes the run first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from struct import Struct
from typing import Any

from anabranch.codec.declaration import schema_of
from anabranch.codec.types import Array, Bytes, Fixed, Nested, String, Type, Uuid


class Source:
    """The source of one module of compiled functions."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.lines: list[str] = []
        self.depth = 0
        self.run: list[tuple[str, str]] = []
        self.serial = count()

    def emit(self, line: str) -> None:
        """Add one line at the present depth."""
        self.lines.append("    " * self.depth + line)

    def name(self, stem: str) -> str:
        """A name used nowhere else."""
        return f"{stem}{next(self.serial)}"

    def constant(self, stem: str, value: Any) -> str:
        """A name bound to `value`, the same for the same value."""
        for known, other in self.namespace.items():
            if other is value:
                return known
        name = self.name(stem)
        self.namespace[name] = value
        return name

    def packer(self, codes: str) -> Struct:
        """The `Struct` of a run, big-endian."""
        return Struct(">" + codes)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Indent the lines emitted within, under `head`."""
        self.emit(head)
        self.depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.emit("pass")
        self.depth -= 1

    def compiled(self, function: str) -> Any:
        """Run the source and take one of its functions."""
        exec(compile("\n".join(self.lines), f"<anabranch.codec {function}>", "exec"), self.namespace)
        return self.namespace[function]


def size_min(kind: Type, version: int, flexible: bool, nullable: bool = False) -> int:
    """The fewest bytes of a value: the bound for a hostile count."""
    match kind:
        case Fixed(size=size):
            return size
        case Uuid():
            return 16
        case String():
            return 1 if flexible else 2
        case Bytes() | Array():
            return 1 if flexible else 4
        case Nested(of=inner):
            if nullable:
                return 1
            fields = schema_of(inner).fields.values()
            return flexible + sum(
                size_min(field.type, version, flexible, version in field.nullable)
                for field in fields
                if field.tag is None and field.exists(version, flexible)
            )
