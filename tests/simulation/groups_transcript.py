"""How a transcript shows values: by their fields, and the same in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any
from uuid import UUID

from anabranch.codec.declaration import is_declared, schema_of
from anabranch.machines.clients.membership.steps import Owned
from anabranch.machines.groups.records import CoordinatorRecord


def shown(value: Any) -> Any:
    """A value for the transcript: without defaults, sets in order, the same in every run."""
    match value:
        case Enum():
            return value.name
        case bool() | int() | str() | None:
            return value
        case UUID():
            return f"#{value.int >> 96}" if value.int >> 96 < 1 << 24 else value.bytes.decode().strip()
        case frozenset() | set():
            return "{" + ", ".join(sorted(str(shown(one)) for one in value)) + "}"
        case bytes() | memoryview():
            return bytes(value).hex() or "-"
        case CoordinatorRecord(key, body):
            return f"{shown(key)} = {shown(body)}"
        case Mapping():
            return "{" + ", ".join(f"{shown(key)}: {shown(one)}" for key, one in value.items()) + "}"
        case Owned(topic, partition, topic_id):
            return f"{topic}-{partition}" + (f" ({shown(topic_id)})" if topic_id.int else "")
        case Sequence():
            return "[" + ", ".join(str(shown(one)) for one in value) + "]"
        case _ if is_declared(type(value)):
            names = [
                name
                for name, field in schema_of(type(value)).fields.items()
                if getattr(value, name) not in (field.default, [], ()) or name in _ALWAYS
            ]
        case _ if is_dataclass(value):
            names = [one.name for one in fields(value)]
        case _:
            return str(value)
    return f"{type(value).__name__}({', '.join(f'{name}={shown(getattr(value, name))}' for name in names)})"


_ALWAYS = ("member_epoch", "topic_partitions", "assigned_partitions")
