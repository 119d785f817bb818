"""A table from the changes of a database, in Spark: `python examples/change_data_capture.py`.

Customers move, appear and are deleted; each change is a record with the customer's id as its key, a deletion a record
without value, in a compacted topic. While changes come in, the topic is resized twice and the broker removes what later
records have replaced. A streaming query compares each change with the row before it and writes what happened (insert,
update, delete) as Parquet; the table is the last change of each customer. In the end it must be the database's, and so
must the table that a batch query makes of what compaction has left.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812
from stage import BLUE, GRAY, GREEN, RED, Stage, chart, main

from anabranch.client.sync import Admin, Producer
from anabranch.spark.keyed import KeyState, keyed

TOPIC = "customers"
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": "8192", "min.cleanable.dirty.ratio": "0.01"}
CITIES = ["Basel", "Bergen", "Cork", "Gdansk", "Lyon", "Porto", "Turku", "Utrecht"]
COLORS = {"insert": GREEN, "update": BLUE, "delete": RED}
RESIZES = {2: 6, 4: 3}
"""Partitions from a round on; there are 2 before."""


class Customer(NamedTuple):
    """A row of the table."""

    city: str
    orders: int


def capture(id_: str, rows: pa.RecordBatch, state: KeyState[Customer]) -> list[tuple[object, ...]]:
    """Compare each change of a customer with the row before it."""
    changes: list[tuple[object, ...]] = []
    for sequence, value in zip(rows["sequence"].to_pylist(), rows["value"].to_pylist(), strict=True):
        before, after = state.value, None if value is None else Customer(**json.loads(value))
        if after is not None:
            changes.append((id_, sequence, "insert" if before is None else "update", after.city, after.orders))
            state.update(after)
        elif before is not None:
            changes.append((id_, sequence, "delete", None, None))
            state.remove()
    return changes


CAPTURE = keyed(
    capture, state=Customer, output="id string, sequence long, operation string, city string, orders long", buckets=8
)


def captured(records: DataFrame) -> DataFrame:
    """Return what happened to each customer."""
    return records.selectExpr("cast(key as string) key", "topic", "partition", "sequence", "value").transform(CAPTURE)


def table_of(changes: DataFrame) -> dict[str, Customer]:
    """Return the table: the last change of each customer, unless it is a deletion."""
    last = changes.groupBy("id").agg(F.max_by(F.struct("operation", "city", "orders"), "sequence").alias("last"))
    rows = last.where("last.operation != 'delete'").select("id", "last.*").collect()
    return {row.id: Customer(row.city, row.orders) for row in rows}


class Database:
    """The database whose changes are captured."""

    def __init__(self, size: int) -> None:
        self._chance = Random(13)
        self._size = size
        self.customers: dict[str, Customer] = {}
        self.changes = 0

    def change(self, producer: Producer, count: int) -> None:
        """Change customers, and send each change."""
        for _ in range(count):
            id_ = f"customer-{self._chance.randrange(self._size):05d}"
            known = self.customers.get(id_)
            if known is not None and self._chance.random() < 0.15:
                del self.customers[id_]
                producer.send(TOPIC, None, key=id_)
            else:
                moves = known is None or self._chance.random() < 0.2
                city = self._chance.choice(CITIES) if moves else known.city
                self.customers[id_] = Customer(city, 0 if known is None else known.orders + 1)
                producer.send(TOPIC, json.dumps(self.customers[id_]._asdict()), key=id_)
        producer.flush()
        self.changes += count


def run(stage: Stage, quick: bool, picture: Path) -> bool:
    """Capture all changes; return whether both tables are the database's."""
    rounds, count = (5, 400) if quick else (8, 6_000)
    database = Database(150 if quick else 2_000)
    changes, done = stage.path("changes"), 0

    def write(batch: DataFrame, number: int) -> None:
        nonlocal done
        batch.write.mode("overwrite").parquet(f"{changes}/batch={number}")  # Written again, it is the same.
        done = number + 1

    resized: list[tuple[int, int]] = []
    with Admin(stage.address) as admin, Producer(stage.address) as producer:
        admin.create_topics(TOPIC, partitions=2, configs=CONFIGS)
        stream = captured(stage.stream(TOPIC, maxOffsetsPerTrigger=str(count)))
        writer = stream.writeStream.foreachBatch(write).option("checkpointLocation", stage.path("checkpoint"))
        query = writer.start()
        for number in range(rounds):
            if number in RESIZES:
                admin.resize(TOPIC, RESIZES[number])
                resized.append((done, RESIZES[number]))
            database.change(producer, count)
            if number % 2 or not quick:
                query.processAllAvailable()
        query.processAllAvailable()
        query.stop()
    happened = stage.spark.read.parquet(changes)
    table, left = table_of(happened), stage.table(TOPIC)
    again = table_of(captured(left))
    sizes = {"changes": database.changes, "left in the topic": left.count(), "rows of the table": len(table)}
    print(f"{sizes}; resized to {[count for _, count in resized]} partitions")
    draw(happened, sizes, resized, picture)
    return table == again == database.customers and sizes["left in the topic"] < sizes["changes"]


def draw(happened: DataFrame, sizes: dict[str, int], resized: list[tuple[int, int]], picture: Path) -> None:
    """Draw what each micro-batch changed, and what compaction has left."""
    figure, (left, right) = chart(2, "A table from a compacted topic that is resized")
    counts = happened.groupBy("batch").pivot("operation", list(COLORS)).count().fillna(0).orderBy("batch").collect()
    batches, bottom = [row.batch for row in counts], [0] * len(counts)
    for operation, color in COLORS.items():
        heights = [row[operation] for row in counts]
        left.bar(batches, heights, bottom=bottom, color=color, label=operation)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    left.set_ylim(0, max(bottom) * 1.35)
    for place, partitions in resized:
        left.axvline(place - 0.5, color=GRAY, linestyle="--", linewidth=1)
        left.text(place - 0.45, max(bottom) * 1.05, f"resized to {partitions}", color=GRAY, fontsize=8)
    left.set(title="Changes in each micro-batch", xlabel="micro-batch", ylabel="changes")
    left.legend(loc="upper left", ncols=3, frameon=False)
    bars = right.barh(list(sizes), list(sizes.values()), color=[BLUE, GRAY, GREEN])
    right.bar_label(bars, padding=4, fmt="{:,.0f}")
    right.set(title="What compaction leaves", xlabel="records", xlim=(0, max(sizes.values()) * 1.15))
    right.invert_yaxis()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main("change_data_capture", run, (__doc__ or "").partition(":")[0], sys.argv[1:]))
