"""Source, keyed state and sink from a Spark Connect session, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from anabranch.client.sync import Admin, Producer
from tests.support.broker import ROOT
from tests.support.thorough import THOROUGH

KEYS, RECORDS = 5, 200


@pytest.mark.skipif(not THOROUGH, reason="a Connect server of its own: make conformance")
@pytest.mark.timeout(600)
def test_a_connect_session_reads_keeps_state_and_writes(address: str, checkpoint: str) -> None:
    pytest.importorskip("grpc")
    with Admin(address) as admin, Producer(address) as producer:
        for topic in ("numbers", "sums"):
            admin.create_topics(topic, partitions=2)
        for number in range(RECORDS):
            producer.send("numbers", str(number), key=f"key-{number % KEYS}")
        producer.flush()
        admin.resize("numbers", 3)
        producer.send("numbers", str(RECORDS), key="key-0").result(30)
        expected = max(0, admin.topic_offsets("numbers")[0].end - 10)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.spark.connect_client", address, checkpoint]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["session"].startswith("pyspark.sql.connect")
    assert said["filtered"] == expected
    sums = {f"key-{key}": str(sum(range(key, RECORDS, KEYS)) + (RECORDS if key == 0 else 0)) for key in range(KEYS)}
    assert said["sums"] == {**sums, "more": "1"}
