"""The pipeline on a Spark standalone cluster: master and two workers from the PySpark package, with nothing of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.client.sync import Admin, Producer
from tests.spark.cluster import ENVIRONMENT, cluster
from tests.support.broker import ROOT
from tests.support.thorough import THOROUGH

KEYS, RECORDS = 12, 600


@pytest.mark.skipif(not THOROUGH, reason="six processes of Java: make conformance")
@pytest.mark.timeout(600)
def test_the_pipeline_runs_on_all_workers_of_a_cluster_with_every_key_in_order(
    address: str, checkpoint: str, tmp_path: Path
) -> None:
    with Admin(address) as admin, Producer(address) as producer:
        for topic in ("cluster-numbers", "cluster-sums"):
            admin.create_topics(topic, partitions=2)
        for number in range(RECORDS):
            if number == RECORDS // 2:
                producer.flush()
                admin.resize("cluster-numbers", 4)
            producer.send("cluster-numbers", str(number), key=f"key-{number % KEYS}")
        producer.flush()
    with cluster(tmp_path) as master:
        command = [sys.executable, "-m", "tests.spark.cluster_driver", master, address, checkpoint]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=400, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["batches"] >= 4
    for key in range(KEYS):
        mine = list(range(key, RECORDS, KEYS))
        steps = [total for total, _ in said["sums"][f"key-{key}"]]
        in_order = {sum(mine[:count]) for count in range(1, len(mine) + 1)}
        assert set(steps) <= in_order and steps == sorted(set(steps)), "a micro-batch had records out of turn"
        assert steps[-1] == sum(mine)
    ran = {executor for sums in said["sums"].values() for _, executors in sums for executor in executors}
    assert {Path(executor).relative_to(tmp_path).parts[0] for executor in ran} == {"worker-1", "worker-2"}
