"""What makes a wide topic leaves lists of all partitions among the young objects: a real broker never looks at these.

To look at such a list is to look at each member, in one step of the loop: 12 ms for 100,000 partitions on some
machines, none too long on others. So what is tested is what is looked at, as the collector of the broker tells it.
"""

from __future__ import annotations

from pathlib import Path

from anabranch.runtime.collector import LARGE_BYTES
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient

COUNT = 12_000
"""Partitions of a topic: a list of them has 96 kB."""
TOLD = "looked-at"
NOTES = f"""
import gc, sys
from anabranch.runtime.collector import Collector

def noting(moment):
    def note(phase, info):
        if phase == "start":
            large = sum(sys.getsizeof(it) > {LARGE_BYTES} for it in gc.get_objects(0))
            with open({{path!r}}, "a") as told:
                print(moment, large, file=told)
    return note

def run(self, *given, run=Collector.run):
    gc.callbacks.insert(0, noting("before"))
    gc.callbacks.append(noting("after"))
    return run(self, *given)

Collector.run = run
"""
"""Has it tell how many large objects are among the young ones as a collection begins: before and after the rule."""


def test_no_large_young_object_is_looked_at_while_a_wide_topic_is_made_and_deleted(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTES.format(path=str(tmp_path / TOLD)))
    broker = BrokerProcess(tmp_path / "data")
    broker.import_paths.append(tmp_path)
    try:
        broker.start()
        with WireClient(broker.port, 120) as client:
            client.create("wide", COUNT)
            client.delete("wide")
        assert broker.stop() == 0
    finally:
        broker.kill()
    told = [line.split() for line in (tmp_path / TOLD).read_text().splitlines()]
    there, seen = (sum(int(count) for said, count in told if said == moment) for moment in ("before", "after"))
    assert there and not seen, (there, seen)
