"""The declaration of a message: one class for all versions, each field's version range, nullability and tag beside it.

`@message` and `@struct` turn the class into a slotted one with keyword construction, equality and a repr. A struct's
versions and flexibility are those of the message that it travels in. `unknown_tags` of every object holds, by tag, the
tagged fields unknown to a reader; a writer puts them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, cast, dataclass_transform

from anabranch.base.limits import NESTING_DEPTH_MAX
from anabranch.codec.types import NOWHERE, Array, Field, Nested, Type, Versions

T = TypeVar("T")

NO_TAGS: Mapping[int, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Schema:
    """The declaration of one class: its fields in wire order and, for a message, its place in the protocol."""

    name: str
    fields: dict[str, Field]
    api_key: int | None
    versions: Versions
    flexible: Versions
    depth: int


def schema_of(declared: type) -> Schema:
    """The declaration of a message or struct class."""
    return cast(Schema, declared.__schema__)  # type: ignore[attr-defined]


def is_declared(candidate: type) -> bool:
    """Whether the class was made by `@message` or `@struct`."""
    return hasattr(candidate, "__schema__")


def unknown_tags(declared: object) -> Mapping[int, bytes]:
    """Tagged fields of a decoded object that its declaration lacks, by tag."""
    return cast(Any, declared).unknown_tags or NO_TAGS


@dataclass_transform(kw_only_default=True)
def message(*, versions: str, flexible: str = "none", api_key: int | None = None) -> Callable[[type[T]], type[T]]:
    """Declare a request, a response or an embedded schema: `@message(api_key=12, versions="0-4", flexible="4+")`."""
    return lambda declared: _declare(declared, api_key, Versions.parse(versions), Versions.parse(flexible))


@dataclass_transform(kw_only_default=True)
def struct() -> Callable[[type[T]], type[T]]:
    """Declare a struct that messages are built from: as a field of theirs, or as a base whose fields come first."""
    return lambda declared: _declare(declared, None, NOWHERE, NOWHERE)


def _declare(declared: type[T], api_key: int | None, versions: Versions, flexible: Versions) -> type[T]:
    own = {name: value for name, value in vars(declared).items() if isinstance(value, Field)}
    assert own.keys() == vars(declared).get("__annotations__", {}).keys(), declared
    inherited = [schema_of(base).fields for base in declared.__bases__ if is_declared(base)]
    fields = {name: value for known in (*inherited, own) for name, value in known.items()}
    tags = [field.tag for field in fields.values() if field.tag is not None]
    assert len(tags) == len(set(tags)), declared
    depth = 1 + max((_depth(field.type) for field in fields.values()), default=0)
    assert depth <= NESTING_DEPTH_MAX, declared
    gone = {*fields, "__dict__", "__weakref__"}
    body = {name: value for name, value in vars(declared).items() if name not in gone}
    body["__slots__"] = (*fields, "unknown_tags")
    body["__match_args__"] = ()
    body["__schema__"] = Schema(declared.__name__, fields, api_key, versions, flexible, depth)
    body["__init__"] = _initialise_later
    body["__eq__"] = _equal
    body["__hash__"] = None
    body["__repr__"] = _show
    return cast(type[T], type(declared.__name__, declared.__bases__, body))


def _depth(kind: Type) -> int:
    match kind:
        case Array(of=element):
            return _depth(element)
        case Nested(of=inner):
            return schema_of(inner).depth
        case _:
            return 0


def _initialise_later(self: Any, **values: Any) -> None:
    """Replace `__init__` until the first object of the class is made: a declaration costs nothing at start."""
    cls = type(self)
    cls.__init__ = _initialiser(cls)
    cls.__init__(self, **values)


def _initialiser(declared: type) -> Callable[..., None]:
    schema = schema_of(declared)
    namespace: dict[str, Any] = {}
    parameters, lines = [], []
    for name, field in schema.fields.items():
        match field:
            case Field(type=Array(), default=()):
                parameters.append(f"{name}=None" if field.nullable == NOWHERE else f"{name}=MADE")
                missing = "None" if field.nullable == NOWHERE else "MADE"
                lines.append(f"    self.{name} = [] if {name} is {missing} else {name}")
            case Field(type=Nested(of=inner), default=default) if default is not None:
                namespace[f"make_{name}"] = inner
                parameters.append(f"{name}=None")
                lines.append(f"    self.{name} = make_{name}() if {name} is None else {name}")
            case Field(default=default):
                namespace[f"default_{name}"] = default
                parameters.append(f"{name}=default_{name}")
                lines.append(f"    self.{name} = {name}")
    namespace["MADE"] = object()
    source = [f"def __init__(self, *, {', '.join([*parameters, 'unknown_tags=None'])}):"]
    exec("\n".join([*source, *lines, "    self.unknown_tags = unknown_tags"]), namespace)
    return cast(Callable[..., None], namespace["__init__"])


def _equal(self: Any, other: Any) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return all(_same(getattr(self, name), getattr(other, name)) for name in type(self).__slots__)


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple):
        one = list(one)
    return one == (list(other) if isinstance(other, tuple) else other)


def _show(self: Any) -> str:
    """Show only fields that differ from their defaults: messages are wide."""
    shown = []
    for name, field in schema_of(type(self)).fields.items():
        value = getattr(self, name)
        default = [] if field.default == () else field.default
        default = default() if isinstance(default, type) else default
        if value != default:
            shown.append(f"{name}={value!r}")
    if self.unknown_tags:
        shown.append(f"unknown_tags={self.unknown_tags!r}")
    return f"{type(self).__name__}({', '.join(shown)})"
