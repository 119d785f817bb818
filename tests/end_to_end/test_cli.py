"""The command line as a user runs it: commands are processes, and so is the broker; scenery is set up in this one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.support import commands
from tests.support.broker import ROOT, BrokerProcess, running
from tests.support.examples import python_examples


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("broker"), group_initial_rebalance_delay_ms=0) as process:
        yield process


class Commands:
    """Runs `anabranch ...` against one broker."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "ANABRANCH_BOOTSTRAP_SERVERS": self.address,
        }

    def run(self, *words: object, stdin: bytes = b"", code: int = 0) -> tuple[bytes, str]:
        done = subprocess.run(
            [sys.executable, "-m", "anabranch.cli", *map(str, words)],
            input=stdin,
            capture_output=True,
            env=self.environment,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr.decode()[-2000:])
        assert "Traceback" not in done.stderr.decode()
        return done.stdout, done.stderr.decode()

    def set_up(self, *words: object, stdin: bytes = b"") -> None:
        """Run a command that is not what is tested, within this process."""
        commands.run(self.address, *words, stdin=stdin)

    def json(self, *words: object, stdin: bytes = b"") -> Any:
        return json.loads(self.run(*words, "--json", stdin=stdin)[0])


@pytest.fixture
def anabranch(broker: BrokerProcess) -> Commands:
    return Commands(broker.port)


def test_the_tour_of_the_readme(anabranch: Commands, tmp_path: Path) -> None:
    rows = "".join(f"N{i % 7},{i}\n" for i in range(1_000))
    (tmp_path / "flights.csv").write_text("tail,number\n" + rows)
    assert anabranch.json("topic", "create", "tour", "--partitions", 2)["created"]
    assert anabranch.json("produce", "tour", "--from", tmp_path / "flights.csv", "--key", "tail")["rows"] == 1_000
    resized = anabranch.json("topic", "resize", "tour", "--partitions", 6)
    assert (resized["from"], resized["to"], resized["retiring"]) == (2, 6, [])
    anabranch.run("produce", "tour", "--from", tmp_path / "flights.csv", "--key", "tail")
    assert anabranch.json("topic", "resize", "tour", "--partitions", 3)["retiring"]
    described = anabranch.json("topic", "describe", "tour")[0]
    assert described["layouts"] == [2, 6, 3]
    assert sum(p["log_end"] - p["log_start"] for p in described["partitions"]) == 2_000
    assert any(p["waits"] for p in described["partitions"])
    out, _ = anabranch.run("consume", "tour", "--format", "json", "--until-end")
    seen: dict[str, list[int]] = {}
    for line in out.splitlines():
        record = json.loads(line)
        seen.setdefault(record["key"], []).append(json.loads(record["value"])["number"])
    assert seen == {f"N{k}": [i for _ in range(2) for i in range(k, 1_000, 7)] for k in range(7)}


def test_the_python_examples_of_the_readme_print_what_they_promise(broker: BrokerProcess, anabranch: Commands) -> None:
    anabranch.set_up("topic", "create", "flights", "--partitions", 2)
    clients, *_ = python_examples("README.md", f"127.0.0.1:{broker.port}")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", clients],
        capture_output=True,
        text=True,
        env=anabranch.environment,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "partition: int32" in done.stdout
    values, _ = commands.run(anabranch.address, "consume", "flights", "--format", "value", "--until-end")
    assert sorted(values.splitlines()) == ["departed", '{"delay": 2}', '{"delay": 4}']


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_standard_input_may_have_any_format(anabranch: Commands, form: str) -> None:
    table = pa.table({"k": ["a", "b"], "v": [1, 2]})
    parquet = io.BytesIO()
    pa.parquet.write_table(table, parquet)
    given = {
        "csv": b"k,v\na,1\nb,2\n",
        "json": b'{"k": "a", "v": 1}\n{"k": "b", "v": 2}\n',
        "parquet": parquet.getvalue(),
    }
    anabranch.set_up("topic", "create", f"stdin-{form}")
    anabranch.run("produce", f"stdin-{form}", "--from", "-", "--format", form, "--key", "k", stdin=given[form])
    out, _ = commands.run(anabranch.address, "consume", f"stdin-{form}", "--format", "json", "--until-end")
    records = [json.loads(line) for line in out.splitlines()]
    assert [(record["key"], json.loads(record["value"])) for record in records] == [
        (row["k"], row) for row in table.to_pylist()
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_consume_leaves_its_group_when_it_is_interrupted_or_terminated(anabranch: Commands, number: int) -> None:
    topic, group = f"signal-{number}", f"told-{number}"
    anabranch.set_up("topic", "create", topic)
    anabranch.set_up("produce", topic, "--from", "-", stdin=b'{"k": 1}\n')
    command = [sys.executable, "-m", "anabranch.cli", "consume", topic, "--group", group, "--format", "value"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=anabranch.environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b'{"k": 1}\n'
    assert len(commands.document(anabranch.address, "group", "describe", group)[0]["members"]) == 1
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"1 records\n")
    [described] = commands.document(anabranch.address, "group", "describe", group)
    assert (described["state"], described["members"]) == ("Empty", [])
    assert [row["committed"] for row in described["offsets"]] == [1]


def test_groups_are_listed_by_types_and_states_with_commas_or_one_by_one(anabranch: Commands) -> None:
    anabranch.set_up("topic", "create", "listed")
    anabranch.set_up("produce", "listed", "--from", "-", stdin=b'{"k": 1}\n')
    for protocol in ("classic", "consumer"):
        words = ("--group", f"listed-{protocol}", "--group-protocol", protocol, "--limit", 1)
        anabranch.set_up("consume", "listed", *words)

    def found(*words: str) -> set[str]:
        names = {group["group_id"] for group in commands.document(anabranch.address, "group", "list", *words)}
        return {name for name in names if name.startswith("listed-")}

    both = {"listed-classic", "listed-consumer"}
    assert found("--type", "classic,consumer", "--state", "stable, empty") == both
    assert found("--type", "classic", "--type", "consumer") == both
    assert found("--type", "classic") == {"listed-classic"}
    assert found("--type", "consumer", "--state", "stable,assigning") == set()
    described = commands.document(anabranch.address, "group", "describe", "--type", "consumer")
    assert {group["type"] for group in described} == {"consumer"}
    assert "listed-consumer" in {group["group"] for group in described}
    _, error = anabranch.run("group", "describe", "listed-classic", "--type", "consumer", code=1)
    assert "group 'listed-classic' is of type classic, not consumer" in " ".join(error.split())


def test_every_format_of_consume(anabranch: Commands) -> None:
    lines = b'{"k": "a", "v": 1}\n{"k": null, "v": 2}\n{"k": "\xc3\xa9", "v": 3}\n'
    anabranch.set_up("topic", "create", "forms")
    anabranch.run("produce", "forms", "--from", "-", "--key", "k", "--compression", "zstd", stdin=lines)
    assert anabranch.run("consume", "forms", "--format", "value", "--until-end")[0] == lines
    table, note = anabranch.run("consume", "forms", "--limit", 2)
    assert len(table.splitlines()) == 3
    assert "2 records" in note
    stream = anabranch.run("consume", "forms", "--format", "arrow", "--until-end")[0]
    arrow = pa.ipc.open_stream(io.BytesIO(stream)).read_all()
    assert arrow.column("key").to_pylist() == [b"a", None, "é".encode()]
    assert anabranch.run("consume", "forms", "--from", "latest", "--until-end")[0] == b""


def test_a_group_goes_on_after_what_was_printed_and_not_after_what_was_fetched(anabranch: Commands) -> None:
    anabranch.set_up("topic", "create", "printed", "--partitions", 2)
    lines = b"".join(b'{"k": %d}\n' % number for number in range(100))
    anabranch.set_up("produce", "printed", "--from", "-", "--key", "k", stdin=lines)
    first = anabranch.run("consume", "printed", "--group", "readers", "--limit", 3, "--format", "value")[0]
    rest = anabranch.run("consume", "printed", "--group", "readers", "--until-end", "--format", "value")[0]
    assert len(first.splitlines()) == 3
    assert sorted([*first.splitlines(), *rest.splitlines()]) == sorted(lines.splitlines())


def test_topics_are_listed_configured_and_deleted(anabranch: Commands) -> None:
    anabranch.set_up("topic", "create", "configured", "-c", "retention.ms=1000")
    anabranch.set_up("topic", "create", "configured", "--if-not-exists")
    anabranch.run("topic", "config", "configured", "--set", "segment.bytes=1048576", "--unset", "retention.ms")
    configs = anabranch.json("topic", "config", "configured")
    assert configs["segment.bytes"] == {"value": "1048576", "is_default": False}
    assert configs["retention.ms"]["is_default"]
    assert "configured" in {topic["topic"] for topic in anabranch.json("topic", "list")}
    anabranch.run("topic", "delete", "configured", "--yes")
    assert "configured" not in {topic["topic"] for topic in anabranch.json("topic", "list")}
    assert b"partitions" in anabranch.run("topic", "list")[0] or anabranch.json("topic", "list") == []


def test_a_key_is_explained_through_resizes_and_deletions(anabranch: Commands) -> None:
    rows = "".join(json.dumps({"key": f"k{number % 9}", "value": f"{number}"}) + "\n" for number in range(90)).encode()
    anabranch.set_up("topic", "create", "told", "--partitions", 1)
    for count in (1, 2, 4, 3):
        if count > 1:
            anabranch.set_up("topic", "resize", "told", "--partitions", count)
        anabranch.set_up("produce", "told", "--from", "-", "--format", "json", "--key", "key", stdin=rows)
    found = anabranch.json("explain", "told", "k3")
    assert [stay["partition_count"] for stay in found["layouts"]] == [1, 2, 4, 3]
    assert found["layouts"][-1]["partition"] == found["partition"]
    assert [stay["state"] for stay in found["layouts"]][-1] == "current"
    assert [stay["last_epoch"] is not None for stay in found["layouts"]] == [True] * 4
    assert found["interval"][0] <= found["spread"] <= found["interval"][1]
    assert anabranch.json("explain", "told", b"k3".hex(), "--hex") == found
    out, _ = anabranch.run("consume", "told", "--format", "json", "--until-end")
    there = [row for row in map(json.loads, out.splitlines()) if row["key"] == "k3"]
    assert len(there) == 40
    for row in there:
        assert any(
            stay["partition"] == row["partition"] and stay["start"] <= row["offset"] < stay["end"]
            for stay in found["layouts"]
        ), (row, found)
    out, _ = anabranch.run("explain", "told", "k3")
    assert out.decode().startswith(f"told, key b'k3': partition {found['partition']}\n")
    assert "current" in out.decode()


def test_a_topic_with_many_layouts_is_described_in_few_lines(anabranch: Commands) -> None:
    anabranch.set_up("topic", "create", "restless", "--partitions", 1)
    for turn in range(31):
        anabranch.set_up("produce", "restless", "--from", "-", "--format", "csv", stdin=b"value\n" + b"x\n" * 40)
        if turn < 30:
            anabranch.set_up("topic", "resize", "restless", "--partitions", 2 - turn % 2)
    out, _ = anabranch.run("topic", "describe", "restless")
    assert "(31 with records, the newest is number 30)" in out.decode()
    assert "before)" in out.decode()
    assert max(map(len, out.decode().splitlines())) <= 200
    assert len(out.decode().splitlines()) < 15
    (described,) = anabranch.json("topic", "describe", "restless")
    assert described["layout_numbers"] == list(range(31))
    assert sum(it["segment_count"] for it in described["partitions"]) >= 31


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("explain", "nowhere", "k"), 1, "nowhere"),
        (("explain", "mistakes", "6g", "--hex"), 2, "hexadecimal"),
        (("topic", "resize", "mistakes", "--partitions", "1"), 1, "2"),
        (("topic", "resize", "mistakes", "--partitions", "0"), 2, "--partitions"),
        (("topic", "describe", "nowhere"), 1, "nowhere"),
        (("topic", "create", "no/name"), 1, "no/name"),
        (("topic", "create", "odd", "-c", "retention.sm=5"), 1, "retention.ms"),
        (("topic", "create", "odd", "-c", "nonsense"), 2, "NAME=VALUE"),
        (("produce", "mistakes", "--from", "nothing.csv"), 1, "nothing.csv"),
        (("produce", "mistakes", "--from", "-", "--key", "k"), 1, "line 2"),
        (("consume", "mistakes", "--ordering", "sideways"), 2, "sideways"),
        (("verify-plan", "/nowhere/at-all"), 1, "/nowhere/at-all"),
        (("frobnicate",), 2, "frobnicate"),
    ],
)
def test_a_mistake_is_a_sentence_and_an_exit_code(
    anabranch: Commands, words: tuple[str, ...], code: int, says: str
) -> None:
    anabranch.set_up("topic", "create", "mistakes", "--partitions", 2, "--if-not-exists")
    _, errors = anabranch.run(*words, stdin=b'{"k": 1}\nnot json\n', code=code)
    assert says in errors


def test_no_broker_is_a_sentence(anabranch: Commands) -> None:
    anabranch.environment["ANABRANCH_BOOTSTRAP_SERVERS"] = "127.0.0.1:1"
    _, errors = anabranch.run("topic", "list", code=1)
    assert "127.0.0.1:1" in errors
