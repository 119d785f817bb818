"""Random messages of any declared class and version, and the same messages as objects of `kio`, the oracle."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import io
import pkgutil
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any
from uuid import UUID

import kio.schema
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer
from kio.serial._introspect import classify_field

from anabranch.codec import NIL, encode, message, schema_of, struct
from anabranch.codec.declaration import is_declared
from anabranch.codec.types import Array, Bytes, Field, Fixed, Nested, String, Type, Uuid
from anabranch.protocol.messages.consumer_protocol_assignment import ConsumerProtocolAssignment
from anabranch.protocol.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from anabranch.protocol.messages.fetch_snapshot import LeaderIdAndEpoch
from anabranch.protocol.messages.update_raft_voter import CurrentLeader
from anabranch.protocol.registry import API

OURS = 10_000
"""Tags from this one on belong to our own fields, which kio does not support."""
ALWAYS_IN_KIO = (CurrentLeader, LeaderIdAndEpoch)
"""Tagged fields that kio cannot leave out, because their struct has fields without a default."""

EMBEDDED = (ConsumerProtocolSubscription, ConsumerProtocolAssignment)
CLASSES = [declared for api in API.values() for declared in (api.request, api.response)] + list(EMBEDDED)

_INTEGERS = {
    "b": st.integers(-(2**7), 2**7 - 1),
    "h": st.integers(-(2**15), 2**15 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "H": st.integers(0, 2**16 - 1),
    "I": st.integers(0, 2**32 - 1),
    "d": st.floats(allow_nan=False),
    "?": st.booleans(),
}
_CODES = st.sampled_from(sorted(code.value for code in ErrorCode))
_MILLISECONDS = st.integers(0, 2**31 - 1)
_TEXT = st.text(max_size=6) | st.sampled_from(["topic", "x" * 126, "x" * 127, "é" * 100])
_BYTES = st.binary(max_size=6) | st.sampled_from([b"y" * 127, b"y" * 2000])


def versions_of(declared: type) -> range:
    """Every version that is declared."""
    versions = schema_of(declared).versions
    return range(versions.first, versions.last + 1)


def messages(declared: type, version: int, *, with_ours: bool) -> st.SearchStrategy[Any]:
    """Messages in which every field that the version has is drawn, and every other has its default."""
    flexible = version in schema_of(declared).flexible

    def struct(inner: type) -> st.SearchStrategy[Any]:
        drawn = {}
        for name, field in schema_of(inner).fields.items():
            if field.exists(version, flexible) and (with_ours or field.tag is None or field.tag < OURS):
                drawn[name] = member(name, field)
        return st.builds(inner, **drawn)

    def member(name: str, field: Field) -> st.SearchStrategy[Any]:
        match field:
            case Field(type=Nested(of=inner), tag=tag) if tag is not None:
                made = struct(inner).map(lambda made: None if made == inner() else made)
                return made.filter(bool) if inner in ALWAYS_IN_KIO else st.none() | made
            case Field(type=Fixed()) if name.endswith("error_code"):
                return _CODES
            case Field(type=Fixed()) if name.endswith("_ms"):
                return _MILLISECONDS
        values = value(field.type)
        return st.none() | values if version in field.nullable else values

    def value(kind: Type) -> st.SearchStrategy[Any]:
        match kind:
            case Fixed(code=code):
                return _INTEGERS[code]
            case Uuid():
                return st.just(NIL) | st.uuids()
            case String():
                return _TEXT
            case Bytes():
                return _BYTES
            case Array(of=element):
                return st.lists(value(element), max_size=3)
            case Nested(of=inner):
                return struct(inner)

    return struct(declared)


def joined(given: object, version: int) -> bytes:
    """The message as one bytes object."""
    return b"".join(bytes(part) for part in encode(given, version))


def kio_class(declared: type, version: int) -> type | None:
    """The class that kio has for a message and version, if any."""
    for name, kind in _kio_modules(declared):
        try:
            module = importlib.import_module(f"kio.schema.{name}.v{version}.{kind}")
        except ModuleNotFoundError:
            return None
        found: type = getattr(module, declared.__name__)
        return found
    return None


def kio_versions(declared: type) -> list[int]:
    """The versions that kio has of a message."""
    for name, _ in _kio_modules(declared):
        package = importlib.import_module(f"kio.schema.{name}")
        return sorted(int(found.name[1:]) for found in pkgutil.iter_modules(package.__path__))
    return []


def _kio_modules(declared: type) -> Iterator[tuple[str, str]]:
    name = declared.__module__.rpartition(".")[2]
    kind = "data" if declared in EMBEDDED else "request" if declared.__name__.endswith("Request") else "response"
    if name in {found.name for found in pkgutil.iter_modules(kio.schema.__path__)}:
        yield name, kind


def to_kio(given: Any, theirs: type) -> Any:
    """Make kio's object of ours; its field names lack units, its times and error codes have types of their own."""
    made = {}
    for field in dataclasses.fields(theirs):
        ours = field.name if hasattr(given, field.name) else f"{field.name}_ms"
        made[field.name] = _member_to_kio(getattr(given, ours), field)
    return theirs(**made)


def _member_to_kio(value: Any, field: dataclasses.Field[Any]) -> Any:
    kind = classify_field(field)
    inner: Any = kind.type_
    nested = dataclasses.is_dataclass(inner)
    if kind.is_array:
        if value is None:
            return None
        return tuple(to_kio(item, inner) if nested else _plain_to_kio(item, field) for item in value)
    if nested:
        if value is None:
            return inner() if "tag" in field.metadata else None
        return to_kio(value, inner)
    return _plain_to_kio(value, field)


def _plain_to_kio(value: Any, field: dataclasses.Field[Any]) -> Any:
    match field.metadata["kafka_type"]:
        case "error_code":
            return ErrorCode(value)
        case "timedelta_i32" | "timedelta_i64":
            return datetime.timedelta(milliseconds=value)
        case "datetime_i64":
            return datetime.datetime.fromtimestamp(value / 1000, datetime.UTC) if value >= 0 else None
        case "uuid":
            return None if value == UUID(int=0) else value
        case _:
            return value


def written_by_kio(theirs: Any) -> bytes:
    """Encode an object by kio."""
    out = io.BytesIO()
    entity_writer(type(theirs))(out, theirs)
    return out.getvalue()


def read_by_kio(data: bytes, theirs: type) -> Any:
    """Decode bytes by kio; all bytes must be read."""
    made: Any
    made, size = entity_reader(theirs)(data, 0)
    assert size == len(data)
    return made


def has_ours(declared: type) -> bool:
    """Whether the message or a struct within it has fields of ours."""
    fields = schema_of(declared).fields.values()
    inner = [field.type.of if isinstance(field.type, Array) else field.type for field in fields]
    return any(field.tag is not None and field.tag >= OURS for field in fields) or any(
        has_ours(kind.of) for kind in inner if isinstance(kind, Nested)
    )


@cache
def without_ours(declared: type) -> type:
    """The declaration as a stock peer has it."""
    schema = schema_of(declared)
    body: dict[str, Any] = {"__annotations__": {}, "__doc__": "As a stock peer has it."}
    for name, field in schema.fields.items():
        if field.tag is None or field.tag < OURS:
            body["__annotations__"][name] = Any
            body[name] = dataclasses.replace(field, type=_without_ours(field.type))
    stock = type(declared.__name__, (), body)
    if not schema.versions.last + 1:
        return struct()(stock)
    versions = f"{schema.versions.first}-{schema.versions.last}"
    flexible = "none" if schema.flexible.last < 0 else f"{schema.flexible.first}+"
    return message(api_key=schema.api_key, versions=versions, flexible=flexible)(stock)


def _without_ours(kind: Type) -> Type:
    match kind:
        case Array(of=element):
            return Array(_without_ours(element))
        case Nested(of=inner):
            return Nested(without_ours(inner))
        case _:
            return kind


def forget_unknown_tags(given: Any) -> None:
    """Drop unknown tagged fields from a message and from all messages within it."""
    given.unknown_tags = None
    for name in schema_of(type(given)).fields:
        value = getattr(given, name)
        for inner in value if isinstance(value, list) else [value]:
            if is_declared(type(inner)):
                forget_unknown_tags(inner)


def filled(declared: type, version: int, random: Random) -> Any:
    """A message with no field empty and no tagged field left out; `random` decides its numbers."""
    flexible = version in schema_of(declared).flexible

    def value(kind: Type) -> Any:
        match kind:
            case Fixed(code="?"):
                return True
            case Fixed(code="d"):
                return random.random()
            case Fixed():
                return random.randrange(1, 127)
            case Uuid():
                return UUID(int=random.getrandbits(128))
            case String():
                return random.choice(["a", "topic", "ü" * 70])
            case Bytes():
                return random.randbytes(random.choice([1, 30]))
            case Array(of=element):
                return [value(element) for _ in range(2)]
            case Nested(of=inner):
                fields = schema_of(inner).fields.items()
                return inner(**{name: value(field.type) for name, field in fields if field.exists(version, flexible)})

    return value(Nested(declared))
