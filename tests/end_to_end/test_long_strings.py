"""Strings as long as a client can make them: one that is too long ends its connection, the longest ones are served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.limits import STRING_SIZE_MAX
from anabranch.codec import schema_of
from anabranch.codec.types import Array, Fixed, Nested, String
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.delete_groups import DeleteGroupsRequest
from anabranch.protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from anabranch.protocol.messages.describe_groups import DescribeGroupsRequest
from anabranch.protocol.messages.describe_transactions import DescribeTransactionsRequest
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from anabranch.protocol.registry import API
from tests.fuzz.arrays import GIVEN
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient

TOO_LONG = "z" * 40_000
LONGEST = "z" * STRING_SIZE_MAX
ROCKET = "\N{ROCKET}"
"""It has four bytes."""


def join(group_id: str, member_id: str = "", **said: Any) -> JoinGroupRequest:
    said.setdefault("protocols", [JoinGroupRequestProtocol(name="range", metadata=b"")])
    said.setdefault("protocol_type", "consumer")
    said.setdefault("rebalance_timeout_ms", 60_000)
    return JoinGroupRequest(group_id=group_id, member_id=member_id, session_timeout_ms=60_000, **said)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory: Path = tmp_path_factory.mktemp("strings")
    settings = {"offsets_topic_num_partitions": 1, "group_initial_rebalance_delay_ms": 0}
    with running(directory, **settings) as broker, WireClient(broker.port) as client:
        for key_type in (0, 1):
            client.call(FindCoordinatorRequest(key_type=key_type, coordinator_keys=["g"]))
        while client.call(join("first"), 5).error_code != ErrorCode.MEMBER_ID_REQUIRED:
            time.sleep(0.02)
        yield broker


LONG: dict[str, tuple[Any, int]] = {
    "group id": (join(TOO_LONG), 6),
    "instance id": (join("g", group_instance_id=TOO_LONG), 6),
    "protocol type": (join("g", protocol_type=TOO_LONG), 6),
    "protocol": (join("g", protocols=[JoinGroupRequestProtocol(name=TOO_LONG, metadata=b"")]), 6),
    "rack": (ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", rack_id=TOO_LONG), 1),
    "transactional id": (InitProducerIdRequest(transactional_id=TOO_LONG, transaction_timeout_ms=1_000), 4),
}


@pytest.mark.parametrize("name", LONG)
def test_a_string_that_is_too_long_ends_its_connection(broker: BrokerProcess, name: str) -> None:
    before = len(broker.said("warning", "connection closed"))
    with WireClient(broker.port) as hostile:
        hostile.send(*LONG[name])
        assert hostile.sock.recv(1) == b""
    (said,) = broker.until_said("warning", "connection closed", before + 1)[before:]
    assert f"a string of 40000 bytes; at most {STRING_SIZE_MAX} are read" in said["reason"]


def strings_of(declared: type, version: int, *, flexible: bool) -> Iterator[tuple[str, ...]]:
    """The paths of all strings of a struct."""
    for name, field in schema_of(declared).fields.items():
        if field.exists(version, flexible):
            kind = field.type.of if isinstance(field.type, Array) else field.type
            if isinstance(kind, String):
                yield (name,)
            elif isinstance(kind, Nested):
                yield from ((name, *rest) for rest in strings_of(kind.of, version, flexible=flexible))


def filled(declared: type, long: tuple[str, ...]) -> Any:
    """A struct with an element in each array; the string at the path `long` is as long as can be."""
    values: dict[str, Any] = {}
    for name, field in schema_of(declared).fields.items():
        kind = field.type.of if isinstance(field.type, Array) else field.type
        given: Any = None
        if isinstance(kind, String):
            given = "\0" * STRING_SIZE_MAX if long == (name,) else "g"
        elif isinstance(kind, Nested):
            given = filled(kind.of, long[1:] if long[:1] == (name,) else ())
        elif isinstance(kind, Fixed):
            given = GIVEN.get(name, 0)
        if given is not None:
            values[name] = [given] if isinstance(field.type, Array) else given
    return declared(**values)


def test_every_string_of_every_request_may_be_the_longest(broker: BrokerProcess) -> None:
    """Whatever quotes it, the answer can be read; a zero is quoted with four characters."""
    with WireClient(broker.port) as client:
        client.create("g")
        for api in API.values():
            for version in sorted({*api.served[:1], *api.served[-1:]}):
                for path in strings_of(api.request, version, flexible=api.flexible(version)):
                    before = len(broker.said("error"))
                    try:
                        client.call(filled(api.request, path), version)
                    except (DecodeError, OSError) as error:
                        raise AssertionError(f"{api.name} v{version}: {'.'.join(path)}") from error
                    assert not broker.said("error")[before:], (api.name, version, path)


LOOK_UPS: dict[str, tuple[Callable[[list[str]], Any], int]] = {
    "DescribeTransactions": (lambda keys: DescribeTransactionsRequest(transactional_ids=keys), 0),
    "DescribeGroups": (lambda keys: DescribeGroupsRequest(groups=keys), 6),
    "DeleteGroups": (lambda keys: DeleteGroupsRequest(groups_names=keys), 2),
    "OffsetFetch": (
        lambda keys: OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=it, topics=[]) for it in keys[:18]]),
        8,
    ),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_the_coordinators_of_the_longest_keys_are_found_in_short_steps(broker: BrokerProcess, name: str) -> None:
    make, version = LOOK_UPS[name]
    numbers = count()

    def ask() -> None:
        """Ask for keys that were never asked for."""
        client.call(make([f"{next(numbers):05}".ljust(STRING_SIZE_MAX - 4, "x") + ROCKET for _ in range(100)]), version)

    with WireClient(broker.port) as client:
        in_short_steps(broker, ask, works={name, "loop"})


@pytest.mark.parametrize("version", [1, 4])
@pytest.mark.parametrize("kind", [2, 4])
def test_a_name_that_is_not_there_is_quoted_in_short(broker: BrokerProcess, kind: int, version: int) -> None:
    """A zero is quoted with four characters."""
    with WireClient(broker.port) as client:
        resource = DescribeConfigsResource(resource_type=kind, resource_name="\0" * STRING_SIZE_MAX)
        (answer,) = client.call(DescribeConfigsRequest(resources=[resource]), version).results
        assert answer.error_code and len(answer.error_message) < 5_000


def test_a_group_of_the_longest_names_keeps_no_other_group_of_its_coordinator_waiting(broker: BrokerProcess) -> None:
    """Its member has joined, and sends no SyncGroup: a timer of the coordinator writes the group without it."""
    with WireClient(broker.port) as honest, WireClient(broker.port) as hostile:
        joined = honest.call(join("honest"), 3)
        member, generation = joined.member_id, joined.generation_id
        given = [SyncGroupRequestAssignment(member_id=member, assignment=b"a")]
        synced = SyncGroupRequest(group_id="honest", generation_id=generation, member_id=member, assignments=given)
        assert honest.call(synced, 3).error_code == ErrorCode.NONE
        for number, instance in enumerate((None, LONGEST)):
            group_id = f"{number}{LONGEST[1:]}"
            protocols = [JoinGroupRequestProtocol(name=LONGEST, metadata=b"")]
            said: dict[str, Any] = {"protocol_type": LONGEST, "protocols": protocols, "group_instance_id": instance}
            said["rebalance_timeout_ms"] = 1
            first = hostile.call(join(group_id, **said), 6, client_id=LONGEST)
            if instance is None:
                assert first.error_code == ErrorCode.MEMBER_ID_REQUIRED
                first = hostile.call(join(group_id, first.member_id, **said), 6, client_id=LONGEST)
            assert first.error_code == ErrorCode.NONE and len(first.member_id) < 300
            gone = HeartbeatRequest(group_id=group_id, generation_id=1, member_id=first.member_id)
            while hostile.call(gone, 4).error_code != ErrorCode.UNKNOWN_MEMBER_ID:
                time.sleep(0.02)
        beat = HeartbeatRequest(group_id="honest", generation_id=generation, member_id=member)
        assert honest.call(beat, 3).error_code == ErrorCode.NONE
    assert not broker.said("error")
