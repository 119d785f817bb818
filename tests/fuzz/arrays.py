"""The largest requests: each array of each API with as many elements as the broker takes, sent to a real broker.

Each array is sent twice, with elements that differ and with one element again and again, in the newest version of its
API that has it. The other fields name things that exist where that is possible, so that the request is not refused at
once. No step of the loop takes 10 ms of the processor. `python -m tests.fuzz.arrays` sends them all, at the bounds of
`anabranch.protocol.bounds`; with `--elements` at most so many.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from anabranch.codec import schema_of
from anabranch.codec.types import Array, Bytes, Field, Fixed, Nested, String, Type, Uuid
from anabranch.protocol.bounds import ELEMENTS_MAX, TOPICS_MAX
from anabranch.protocol.registry import API
from tests.fuzz.frames import make_coordinators
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient, batch

TOPIC, PARTITIONS = "wide", 1_000
LONG_MIN = 2_000
"""APIs with lower bounds are short requests whatever they hold."""
SPARE = 20
"""Elements of the arrays around the long one, and tagged fields."""
TIMEOUT_S = 120.0
DIFFERING, SAME, DEEP = "differing", "same", "deep"
"""Elements that differ, one again and again, or fewer that have one element each in their own arrays."""
RECORDS = bytes(batch([b"x"]))
GIVEN: dict[str, Any] = {
    "timeout_ms": 100, "max_wait_ms": 100, "session_timeout_ms": 10_000, "rebalance_timeout_ms": 100,
    "resource_type": 2, "num_partitions": -1, "replication_factor": -1, "acks": -1, "producer_id": -1,
    "producer_epoch": -1, "max_bytes": 1 << 20, "min_bytes": 1, "partition_max_bytes": 1 << 20, "fetch_offset": 0,
    "group_id": "g", "member_id": "", "api_key": 0, "key_type": 0, "session_id": 0, "session_epoch": 0,
    "current_leader_epoch": -1, "timestamp": 7, "leader_epoch": 0, "last_fetched_epoch": -1, "election_type": 0,
    "transactional_id": "t", "v3_and_below_transactional_id": "t", "response_partition_limit": 2_000,
    "protocol_type": "consumer", "path": "/nowhere", "count": 3, "resource_name": TOPIC, "config_operation": 0,
    "undeleted_partition_count": -1, "response_partitions_limit": 2_000, "member_epoch": 0, "offset": 0,
    "validate_only": True, "cursor": None,
}  # fmt: skip
"""Values by the name of the field; other texts are TOPIC, other numbers 0."""


class Place(NamedTuple):
    """One array of a request."""

    key: int
    version: int
    path: tuple[str, ...]

    def __str__(self) -> str:
        return f"{API[self.key].name} v{self.version} {'.'.join(self.path)}"


def places() -> Iterator[Place]:
    """All arrays of the requests that may be long, each in the newest version that has it, and in the oldest."""
    for key, api in API.items():
        if not api.served or ELEMENTS_MAX.get(key, 0) < LONG_MIN:
            continue
        found: dict[tuple[str, ...], list[int]] = {}
        for version in api.served:
            for path in _paths(api.request, version, api.flexible(version)):
                found.setdefault(path, []).append(version)
        for path, versions in found.items():
            for version in sorted({versions[0], versions[-1]}):
                yield Place(key, version, path)


def _paths(declared: type, version: int, flexible: bool) -> Iterator[tuple[str, ...]]:
    for name, field in schema_of(declared).fields.items():
        if not field.exists(version, flexible):
            continue
        inner = field.type
        if isinstance(inner, Array):
            yield (name,)
            inner = inner.of
        if isinstance(inner, Nested):
            yield from ((name, *rest) for rest in _paths(inner.of, version, flexible))


class Maker:
    """Makes one request with one long array."""

    def __init__(self, place: Place, kind: str, size: int, topic_id: UUID) -> None:
        self._place, self._kind, self._size, self._topic_id = place, kind, size, topic_id
        self._numbers = count()

    def request(self) -> Any:
        """The request."""
        return self._struct(API[self._place.key].request, self._place.path, ())

    def _struct(self, declared: type, path: tuple[str, ...], at: tuple[str, ...], *, deep: bool = False) -> Any:
        """A struct; `path` leads from it to the long array, empty where it is within that or beside."""
        flexible = API[self._place.key].flexible(self._place.version)
        values = {}
        for name, field in schema_of(declared).fields.items():
            if not field.exists(self._place.version, flexible):
                continue
            if path and path[0] == name:
                values[name] = self._on_the_way(field, path[1:], (*at, name))
            elif isinstance(field.type, Array):
                values[name] = [self._element(field.type.of, name)] if deep else []
            elif isinstance(field.type, Nested):
                values[name] = field.default if field.default is None else self._struct(field.type.of, (), ())
            else:
                values[name] = self._plain(field.type, name, within=deep or not path)
        return declared(**values)

    def _on_the_way(self, field: Field, rest: tuple[str, ...], at: tuple[str, ...]) -> Any:
        of = field.type.of if isinstance(field.type, Array) else field.type
        if rest:
            assert isinstance(of, Nested)
            found = self._struct(of.of, rest, at)
            return [found] if isinstance(field.type, Array) else found
        if self._kind == SAME:
            return [self._element(of, at[-1])] * self._size
        if self._kind == DEEP:
            arrays = sum(isinstance(it.type, Array) for it in schema_of(of.of).fields.values())
            return [self._element(of, at[-1], deep=True) for _ in range(self._size // (1 + arrays))]
        return [self._element(of, at[-1]) for _ in range(self._size)]

    def _element(self, of: Type, name: str, *, deep: bool = False) -> Any:
        if isinstance(of, Nested):
            return self._struct(of.of, (), (), deep=deep)
        return self._plain(of, name, within=True)

    def _plain(self, kind: Type, name: str, *, within: bool) -> Any:
        number = next(self._numbers) if within else 0
        match kind:
            case Fixed(code="?"):
                return bool(GIVEN.get(name, False))
            case Fixed(code="d"):
                return 0.0
            case Uuid():
                return self._topic_id
            case Fixed(code="i") if "partition" in name and name not in GIVEN:
                return number
            case Fixed():
                given = GIVEN.get(name, 0)
                return given if isinstance(given, int) else 0
            case Bytes():
                return RECORDS if kind.passes_through else b""
            case String():
                if within and name not in ("path",):
                    return f"{name[0]}{number}"
                return GIVEN.get(name, TOPIC)
        raise AssertionError(kind)


def kinds_of(place: Place) -> Iterator[str]:
    """The ways to fill an array."""
    declared: Any = API[place.key].request
    for name in place.path:
        kind = schema_of(declared).fields[name].type
        kind = kind.of if isinstance(kind, Array) else kind
        declared = kind.of if isinstance(kind, Nested) else None
    yield DIFFERING
    yield SAME
    if declared is not None and any(isinstance(it.type, Array) for it in schema_of(declared).fields.values()):
        yield DEEP


def _bound(place: Place) -> int:
    most = TOPICS_MAX.get(place.key) if place.path == ("topics",) else None
    return ELEMENTS_MAX[place.key] - SPARE if most is None else most


def begin(broker: BrokerProcess) -> UUID:
    """Make what the requests name; the id of the topic."""
    with WireClient(broker.port, TIMEOUT_S) as client:
        topic_id = client.create(TOPIC, PARTITIONS)
        make_coordinators(client)
        return topic_id


def send(broker: BrokerProcess, place: Place, kind: str, size: int, topic_id: UUID) -> int:
    """Send one request in short steps of the broker; the size of the answer, 0 if the connection was closed."""
    request = Maker(place, kind, min(size, _bound(place)), topic_id).request()

    def ask() -> int:
        with WireClient(broker.port, TIMEOUT_S) as client, contextlib.suppress(ConnectionError):
            client.send(request, place.version)
            return len(client.receive_frame())
        return 0

    answer = in_short_steps(broker, ask)
    assert broker.alive and not broker.said("error") and not broker.said("raw"), (place, broker.said("error")[:3])
    return answer


def main() -> int:
    """Send them all, and say how it goes; the exit code is 1 if a step was long."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.arrays", description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 30)
    parser.add_argument("--only", default="", help="a part of the names of the arrays")
    given = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as directory, running(Path(directory)) as broker:
        topic_id = begin(broker)
        for place in places():
            for kind in kinds_of(place) if given.only in str(place) else ():
                began = time.monotonic()
                try:
                    said = f"{send(broker, place, kind, given.elements, topic_id)} bytes"
                except AssertionError as error:
                    bad, said = bad + 1, f"LONG: {error}"
                print(f"{place} {kind}: {said}, {time.monotonic() - began:.1f} s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
