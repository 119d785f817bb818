"""Jars are used only when they are the ones that were locked."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from benchmarks.peers import artifacts
from benchmarks.peers.artifacts import KAFKA_LOCK, ArtifactError, fetch, read_lock


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(artifacts, "TOOLS", tmp_path)
    return tmp_path


def lock_of(tools: Path, data: bytes) -> Path:
    lock = tools / "some.lock"
    lock.write_text(f"# a comment\norg.example:thing:1.0 {hashlib.sha256(data).hexdigest()}\n")
    return lock


def test_a_jar_that_is_there_is_not_fetched_again(tools: Path) -> None:
    lock = lock_of(tools, b"jar")
    (tools / "some").mkdir()
    (tools / "some" / "thing-1.0.jar").write_bytes(b"jar")
    assert fetch(lock) == [tools / "some" / "thing-1.0.jar"]
    assert fetch(lock, only=["another"]) == []


def test_a_jar_that_is_not_the_locked_one_is_not_used(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def retrieve(*_: object, **__: object) -> Path:
        jars = tools / "jars"
        jars.mkdir()
        (jars / "thing-1.0.jar").write_bytes(b"another")
        return jars

    monkeypatch.setattr(artifacts, "_retrieve", retrieve)
    with pytest.raises(ArtifactError, match="is locked"):
        fetch(lock_of(tools, b"jar"))
    assert not (tools / "some" / "thing-1.0.jar").exists()


def test_the_lock_of_kafka_pins_every_jar_by_its_hash() -> None:
    jars = read_lock(KAFKA_LOCK)
    assert {"kafka_2.13", "kafka-clients", "kafka-tools"} <= {jar.name for jar in jars}
    assert all(len(jar.sha256) == 64 for jar in jars)
    assert len({jar.name for jar in jars}) == len(jars)
