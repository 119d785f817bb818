"""Every declaration against Kafka's own message definitions, as kafka-python carries them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from kafka.protocol.schemas import load_json

from anabranch.codec import NIL, schema_of
from anabranch.codec.types import NOWHERE, Array, Field, Nested, Versions
from anabranch.protocol.registry import API
from tests.support.messages import CLASSES, OURS, versions_of

ZERO = {"string": "", "bool": False, "bytes": b"", "records": None, "uuid": NIL, "float64": 0.0}
CHOSEN = {("CreatePartitionsTopic", "assignments"): None}
"""Kafka's default is an empty list, which its broker refuses; ours is the null that says "choose for me"."""


RENAMED = {"EntryDataResult": "EntryData", "PartitionDataResult": "PartitionData", "TopicDataResult": "TopicData"}
"""Structs that share their name with another one of the same API."""


def definition(declared: type) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = load_json(declared.__name__)
    except FileNotFoundError:
        return None
    return found


DEFINED = [declared for declared in CLASSES if definition(declared)]


def field_name(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def those(text: str | None, versions: list[int]) -> list[int]:
    within = Versions.parse(text) if text else NOWHERE
    return [version for version in versions if version in within]


def default_of(defined: dict[str, Any]) -> Any:
    kind, default = defined["type"], defined.get("default")
    if default is None:
        return ZERO.get(kind, () if kind.startswith("[]") else 0)
    if default == "null":
        return None
    if kind == "bool":
        return default in (True, "true")
    return int(str(default), 0) if kind.startswith(("int", "uint")) else default


def differences(declared: type, defined: list[dict[str, Any]], versions: list[int], flexible: int) -> Iterator[str]:
    schema = schema_of(declared)
    defined = [field for field in defined if those(field["versions"], versions)]
    ours = {name: field for name, field in schema.fields.items() if field.tag is None or field.tag < OURS}
    ours = {name: field for name, field in ours.items() if any(version in field.versions for version in versions)}
    names = [field_name(field["name"]) for field in defined]
    if names != list(ours):
        yield f"{schema.name} has {list(ours)}, Kafka {names}"
        return
    for field, name in zip(defined, names, strict=True):
        mine: Field = ours[name]
        there = [each for each in versions if mine.exists(each, each >= flexible)]
        facts = {
            "versions": (there, those(field["versions"], versions)),
            "nullable": (
                [each for each in there if each in mine.nullable],
                those(field.get("nullableVersions"), there),
            ),
            "tag": (mine.tag, field.get("tag")),
        }
        if not isinstance(mine.type, Nested):
            facts["default"] = (mine.default, CHOSEN.get((schema.name, name), default_of(field)))
        for fact, (got, wanted) in facts.items():
            if got != wanted:
                yield f"{schema.name}.{name}: {fact} {got}, Kafka {wanted}"
        element = mine.type.of if isinstance(mine.type, Array) else mine.type
        if isinstance(element, Nested):
            called = element.of.__name__
            if RENAMED.get(called, called) != field["type"].removeprefix("[]"):
                yield f"{schema.name}.{name} is a {element.of.__name__}, Kafka's a {field['type']}"
            yield from differences(element.of, field["fields"], there, flexible)


@pytest.mark.parametrize("declared", DEFINED, ids=lambda declared: declared.__name__)
def test_a_declaration_says_what_kafka_says(declared: type) -> None:
    defined = definition(declared)
    assert defined is not None
    versions = those(defined["validVersions"], list(versions_of(declared)))
    assert versions
    assert not list(differences(declared, defined["fields"], versions, schema_of(declared).flexible.first))


def test_most_messages_are_defined_there() -> None:
    assert len(DEFINED) > 70


@pytest.mark.parametrize("api", API.values(), ids=lambda api: api.name)
def test_the_registry_says_what_the_declarations_say(api: Any) -> None:
    for declared in (api.request, api.response):
        schema = schema_of(declared)
        assert schema.api_key == api.key
        assert versions_of(declared) == api.versions
        assert all((version in schema.flexible) == api.flexible(version) for version in api.versions)
    assert set(api.served) <= set(api.versions)
