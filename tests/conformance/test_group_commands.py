"""`anabranch group` and `anabranch consume --group` as a user runs them; `make conformance` tries Apache Kafka, too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from anabranch.client import sync
from benchmarks.peers.kafka import ApacheKafka
from tests.conformance.kinds import ALL_KINDS
from tests.support.broker import running
from tests.support.commands import document, run


@pytest.fixture(scope="module", params=["anabranch", "apache-kafka"] if ALL_KINDS in os.environ else ["anabranch"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "anabranch":
        with running(tmp_path_factory.mktemp("broker"), group_initial_rebalance_delay_ms=0) as broker:
            yield f"127.0.0.1:{broker.port}"
    else:
        with ApacheKafka(settings={"group.initial.rebalance.delay.ms": "0"}) as kafka:
            yield kafka.address


def test_the_life_of_a_group(address: str) -> None:
    name, protocol = f"life-{time.time_ns()}", "consumer"
    with sync.Admin(address) as admin, sync.Producer(address) as producer:
        admin.create_topics(name, partitions=2, configs={"retention.ms": "-1"})  # its records are old
        for number in range(20):
            producer.send(name, str(number), partition=number % 2, timestamp=1_700_000_000_000 + number)
    reading = ("consume", name, "--group", name, "--group-protocol", protocol, "--format", "value", "--until-end")
    assert sorted(map(int, run(address, *reading)[0].split())) == list(range(20))
    assert run(address, *reading)[0] == ""
    assert name in [group["group_id"] for group in document(address, "group", "list", "--state", "empty")]
    assert name not in [group["group_id"] for group in document(address, "group", "list", "--state", "Stable")]
    [described] = document(address, "group", "describe", name)
    assert (described["state"], described["members"]) == ("Empty", [])
    assert [(row["committed"], row["log_end"], row["lag"]) for row in described["offsets"]] == [(10, 10, 0)] * 2
    with sync.Consumer(address, group_id=name, group_protocol=protocol, client_id="watched") as consumer:
        consumer.subscribe(name)
        while len(consumer.assignment()) < 2:
            consumer.poll(0.1)
        [described] = document(address, "group", "describe", name)
        [member] = described["members"]
        assert (member["client_id"], member["type"], member["pending"]) == ("watched", protocol, [])
        assert member["current"] == member["target"] == [[name, 0], [name, 1]]
        assert {row["owner"] for row in described["offsets"]} == {member["member_id"]}
        out, _ = run(address, "group", "describe", name)
        assert f"{name} 0-1" in out and "watched" in out
        _, err = run(address, "group", "delete", name, "--yes", code=1)
        assert "it has members; stop them first" in err
    shown = document(address, "group", "reset-offsets", name, "--to-earliest")
    assert not shown["executed"] and [row["to"] for row in shown["offsets"]] == [0, 0]
    assert run(address, *reading)[0] == ""
    out, err = run(address, "group", "reset-offsets", name, "--shift-by", "-3", "--topic", f"{name}:1", "--execute")
    assert "Offsets reset." in err
    assert sorted(map(int, run(address, *reading)[0].split())) == [15, 17, 19]
    when = "2023-11-14T22:13:20.010+00:00"
    moved = document(address, "group", "reset-offsets", name, "--to-datetime", when, "--execute")
    assert [(row["from"], row["to"], row["lag"]) for row in moved["offsets"]] == [(10, 5, 5)] * 2
    moved = document(address, "group", "reset-offsets", name, "--to-offset", "99", "--topic", name)
    assert [row["to"] for row in moved["offsets"]] == [10, 10]
    assert document(address, "group", "delete", name, "--yes") == {"deleted": [name]}
    _, err = run(address, "group", "describe", name, code=1)
    assert f"there is no group '{name}'" in err


def test_patterns_are_tried_out_and_misuse_is_explained(address: str) -> None:
    name = f"tried-{time.time_ns()}"
    with sync.Admin(address) as admin:
        admin.create_topics([f"{name}-1", f"{name}-2"], partitions=1)
    assert run(address, "group", "validate-regex", f"{name}-\\d")[0].split() == [f"{name}-1", f"{name}-2"]
    assert document(address, "group", "validate-regex", name)["topics"] == []
    _, err = run(address, "group", "validate-regex", "(", code=1)
    assert "'(' is not an RE2 regular expression: missing )" in err
    assert "give exactly one of" in run(address, "group", "reset-offsets", "g", code=2)[1]
    assert (
        "expected a date"
        in run(address, "group", "reset-offsets", "g", "--topic", f"{name}-1", "--to-datetime", "x", code=2)[1]
    )
    assert (
        "has no committed offsets" in run(address, "group", "reset-offsets", f"{name}-none", "--to-latest", code=1)[1]
    )
    assert "--group or --partition" in run(address, "consume", f"{name}-1", "--group", "g", "-p", "0", code=2)[1]
