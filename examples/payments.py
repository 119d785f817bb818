"""A join of two topics with different histories, in Spark: `python examples/payments.py`.

Orders and payments have the customer as their key. Each topic is resized on its own, at other times and to other
numbers of partitions. One query reads both; `keyed` hands it a customer's new orders and payments together, wherever
they were. It pairs each payment with its order, whichever comes first, and keeps what has no partner yet. In the end
each paid order must be there once, with both amounts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from stage import BLUE, GRAY, GREEN, RED, Stage, chart, main

from anabranch.client.sync import Admin, Producer
from anabranch.spark.keyed import KeyState, keyed

ORDERS, PAYMENTS = "orders", "payments"
HISTORIES = {ORDERS: [2, 2, 5, 5, 3, 3, 3], PAYMENTS: [3, 4, 4, 8, 8, 8, 6]}
"""The partitions of each topic, round by round."""
COLORS = {ORDERS: BLUE, PAYMENTS: GREEN}


class Open(NamedTuple):
    """What a customer has without a partner: numbers of orders, and their amounts."""

    orders: list[int]
    ordered: list[float]
    payments: list[int]
    paid: list[float]


def pair(customer: str, rows: pa.RecordBatch, state: KeyState[Open]) -> list[tuple[object, ...]]:
    """Pair the new orders and payments of a customer with each other and with what was open."""
    before = state.value or Open([], [], [], [])
    ordered = dict(zip(before.orders, before.ordered, strict=True))
    paid = dict(zip(before.payments, before.paid, strict=True))
    for topic, value in zip(rows["topic"].to_pylist(), rows["value"].to_pylist(), strict=True):
        event = json.loads(value)
        (ordered if topic == ORDERS else paid)[event["order"]] = event["amount"]
    pairs = [(customer, order, ordered.pop(order), paid.pop(order)) for order in sorted(ordered.keys() & paid.keys())]
    if ordered or paid:
        state.update(Open(list(ordered), list(ordered.values()), list(paid), list(paid.values())))
    elif state.value is not None:
        state.update(Open([], [], [], []))
    return pairs


class Shop:
    """Sends orders and payments; knows the pairs that must come of them."""

    def __init__(self, customers: int) -> None:
        self._chance = Random(5)
        self._customers = customers
        self._unpaid: list[tuple[str, int, float]] = []
        self.orders = 0
        self.expected: set[tuple[str, int, float, float]] = set()

    def trade(self, producer: Producer, count: int) -> None:
        """Send `count` orders, some payments of earlier ones, and some payments whose order comes behind them."""
        for _ in range(count):
            order = f"customer-{self._chance.randrange(self._customers)}", self.orders, round(self._chance.random(), 3)
            self.orders += 1
            early = self._chance.random() < 0.2
            if early:
                self._pay(producer, order)
            producer.send(ORDERS, json.dumps({"order": order[1], "amount": order[2]}), key=order[0])
            if not early:
                self._unpaid.append(order)
            while len(self._unpaid) > count // 2:
                self._pay(producer, self._unpaid.pop(self._chance.randrange(len(self._unpaid))))
        producer.flush()

    def _pay(self, producer: Producer, order: tuple[str, int, float]) -> None:
        paid = round(order[2] * 1.2, 4)
        producer.send(PAYMENTS, json.dumps({"order": order[1], "amount": paid}), key=order[0])
        self.expected.add((*order, paid))


def run(stage: Stage, quick: bool, picture: Path) -> bool:
    """Let the shop trade; return whether the pairs are right."""
    shop = Shop(40 if quick else 1_000)
    found: dict[int, list[tuple[str, int, float, float]]] = {}
    progress: list[tuple[int, int, int]] = []

    def take(batch: DataFrame, number: int) -> None:
        found[number] = [tuple(row) for row in batch.collect()]

    with Admin(stage.address) as admin, Producer(stage.address) as producer:
        for topic, counts in HISTORIES.items():
            admin.create_topics(topic, partitions=counts[0])
        both = stage.stream(f"{ORDERS},{PAYMENTS}").selectExpr(
            "cast(key as string) key", "topic", "partition", "sequence", "value"
        )
        pairs = both.transform(
            keyed(pair, state=Open, output="customer string, number long, amount double, paid double", buckets=8)
        )
        writer = pairs.writeStream.foreachBatch(take).option("checkpointLocation", stage.path("checkpoint"))
        query = writer.start()
        for number in range(len(HISTORIES[ORDERS])):
            for topic, counts in HISTORIES.items():
                if number and counts[number] != counts[number - 1]:
                    admin.resize(topic, counts[number])
            shop.trade(producer, 100 if quick else 3_000)
            if not quick or number % 3 == 0:
                query.processAllAvailable()
            progress.append((shop.orders, len(shop.expected), sum(map(len, found.values()))))
        query.processAllAvailable()
        query.stop()
    all_pairs = [each for batch in found.values() for each in batch]
    print(f"{shop.orders} orders, {len(shop.expected)} payments, {len(all_pairs)} pairs in {len(found)} micro-batches")
    draw(progress, len(all_pairs), picture)
    return len(all_pairs) == len(shop.expected) and set(all_pairs) == shop.expected


def draw(progress: list[tuple[int, int, int]], pairs: int, picture: Path) -> None:
    """Draw the histories of both topics, and what was paired meanwhile."""
    figure, (left, right) = chart(2, "Orders joined with payments while both topics are resized")
    for topic, counts in HISTORIES.items():
        left.step(range(len(counts) + 1), [*counts, counts[-1]], where="post", color=COLORS[topic], linewidth=2)
        left.annotate(topic, (0.1, counts[0] + 0.15), color=COLORS[topic])
    left.set(title="Partitions", xlabel="round", ylabel="partitions", ylim=(0, 9))
    lines = zip(("orders", "payments", "pairs"), (BLUE, GREEN, RED), zip(*progress, strict=True), strict=True)
    for name, color, values in lines:
        right.plot(range(1, len(values) + 1), values, marker="o", markersize=4, color=color, label=name)
    right.axhline(pairs, color=GRAY, linestyle="--", linewidth=1, label="pairs in the end")
    right.set(title="Sent, and paired so far", xlabel="round", ylim=(0, None))
    right.legend(frameon=False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main("payments", run, (__doc__ or "").partition(":")[0], sys.argv[1:]))
