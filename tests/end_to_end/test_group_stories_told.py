"""What a broken promise is explained by: the story of the members, told by them and recorded by their coordinator."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.application_edge import OrderError
from tests.support.applications import LATE_NS, QUICK, Workers, stage
from tests.support.broker import running


@pytest.mark.parametrize(("library", "protocol"), [("stock", "consumer"), ("ours", "classic")])
def test_a_partition_with_two_owners_comes_with_what_the_coordinator_took_its_owners_for(
    tmp_path_factory: pytest.TempPathFactory, own_workers: Workers, library: str, protocol: str
) -> None:
    short = {**QUICK, "group.consumer.session.timeout.ms": 2_000}
    with (
        running(tmp_path_factory.mktemp("data"), **short) as broker,
        stage(broker.address, "owned", 2, own_workers) as it,
    ):
        group = it.group(library, commit="each", protocol=protocol, session_ms=2_000)
        it.until_all_owned()
        owner = group.members[0]
        other = group.join(process="other", session_ms=2_000)
        it.until(lambda: len(owner.owned) == len(other.owned) == 1, "they do not share")
        group.check()
        ((_, number),) = owner.owned
        claim = {"at": time.monotonic_ns(), "of": other.name, "event": "assigned", "partitions": [[it.topic, number]]}
        group._arrived(claim)
        with pytest.raises(OrderError, match=f"which {owner.name} still has") as broken:
            group.check()
        (note,) = broken.value.__notes__
        lines = note.splitlines()
        assert any(line.endswith(f"{other.name}: assigned [{number}]") for line in lines), note
        if protocol == "consumer":
            kept = [line for line in lines if f"coordinator: {owner.name} owns [{number}]" in line]
            assert kept and not any("is removed" in line for line in lines), note
        else:
            assert f"{{'{owner.name}': [{number}]" in note or f", '{owner.name}': [{number}]" in note, note
        other.kill()
        it.until(lambda: len(owner.owned) == 2, "the dead member is not removed")
        told = group.story.before(time.monotonic_ns() + LATE_NS, members=[other.name])
        assert f"{other.name}: is killed" in told
        if protocol == "consumer":
            assert told.index(f"{other.name}: is killed") < told.index(f"coordinator: {other.name} is removed"), told
        assert f"coordinator: {owner.name} owns" not in told


def test_what_a_process_says_late_is_put_in_order_before_it_is_judged(
    tmp_path_factory: pytest.TempPathFactory, own_workers: Workers
) -> None:
    """One process' pipe is read two seconds late: its partitions seem to go to the other before it gives them up."""
    with (
        running(tmp_path_factory.mktemp("data"), **QUICK) as broker,
        stage(broker.address, "late", 4, own_workers) as it,
    ):
        group = it.group("ours", commit="each")
        it.until_all_owned()
        first = group.members[0]
        said, late = first.worker.said, []

        def said_late(event: dict[str, Any]) -> None:
            if event["event"] == "revoked" and not late:
                late.append(event)
                time.sleep(2)
            said(event)

        first.worker.said = said_late  # type: ignore[method-assign]
        second = group.join(process="other")
        it.until(lambda: second.owned, "they do not share")
        it.keeps(lambda: group.check(time.monotonic_ns()) is None, "never: it raises")
        assert late and len(first.owned) == 4, "the first process was not late"
        it.until(lambda: len(first.owned) == len(second.owned) == 2, "they do not share")
        group.check()
