"""A query with state by key, from topic `in` to topic `out`, as a process that is killed and started again.

    python -m tests.spark.keyed_driver ADDRESS CHECKPOINT STORE

It runs until the file CHECKPOINT.end is there, and then until it has written all. A worker that finds the file
CHECKPOINT.kill in a task removes it, and kills itself. Every micro-batch writes for each of
its keys how many values the key has had, and a digest of them in their order. STORE is the provider of Spark's state
store, by its simple name.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from anabranch.demo.session import local_session
from anabranch.spark import register
from anabranch.spark.keyed import KeyState, keyed

PROVIDERS = "org.apache.spark.sql.execution.streaming.state"
ATTEMPTS = 8


class Digest(NamedTuple):
    """Depends on every value and on their order."""

    count: int
    digest: int

    def with_value(self, value: int) -> Digest:
        return Digest(self.count + 1, (self.digest * 31 + value) % 1_000_003)


def follower(kill: str) -> Callable[[str, pa.RecordBatch, KeyState[Digest]], tuple[Any, ...]]:
    """Return the function of a key's rows."""

    def follow(key: str, rows: pa.RecordBatch, state: KeyState[Digest]) -> tuple[Any, ...]:
        digest = state.value or Digest(0, 0)
        for value in rows.column("value").to_pylist():
            digest = digest.with_value(value)
        state.update(digest)
        if os.path.exists(kill):
            with suppress(FileNotFoundError):
                os.unlink(kill)
                os.kill(os.getpid(), signal.SIGKILL)
        return key, f"{digest.count} {digest.digest}"

    return follow


def main(address: str, checkpoint: str, store: str) -> None:
    """Run the query."""
    spark = local_session("keyed", attempts=ATTEMPTS)
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", f"{PROVIDERS}.{store}")
    register(spark)
    source = spark.readStream.format("anabranch").option("kafka.bootstrap.servers", address)
    rows = source.options(subscribe="in", startingOffsets="earliest", maxOffsetsPerTrigger="2000").load()
    values = rows.selectExpr(
        "cast(key as string) key", "topic", "partition", "sequence", "cast(cast(value as string) as long) value"
    )
    follow = follower(f"{checkpoint}.kill")
    query = (
        values.transform(keyed(follow, state=Digest, output="key string, value string", buckets=2))
        .writeStream.format("anabranch")
        .option("kafka.bootstrap.servers", address)
        .options(topic="out", checkpointLocation=checkpoint)
        .start()
    )
    while query.isActive and not Path(f"{checkpoint}.end").exists():
        time.sleep(0.1)
    query.processAllAvailable()
    query.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
