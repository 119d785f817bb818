"""What the producer owes: outcomes of tables, and what a flush waits for and raises."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from anabranch.client.producer.delivery import (
    ColumnsMetadata,
    DeliveryError,
    OpenRecords,
    TableDelivery,
    fail_promise,
)


def table(rows: int) -> tuple[TableDelivery, Future[ColumnsMetadata]]:
    promise: Future[ColumnsMetadata] = Future()
    delivery = TableDelivery("t", promise, 0)
    delivery.open_count = rows
    return delivery, promise


def test_a_table_is_delivered_when_its_last_row_is_with_the_first_and_last_offset_of_each_partition() -> None:
    delivery, promise = table(7)
    delivery.delivered(0, 10, 2)
    delivery.delivered(1, 5, 1)
    delivery.delivered(0, 4, 3)
    assert not promise.done()
    delivery.delivered(2, -1, 1)
    assert promise.result() == ColumnsMetadata("t", 7, {0: (4, 11), 1: (5, 5)})


def test_a_table_of_which_rows_failed_fails_with_their_number_and_the_first_reason() -> None:
    delivery, promise = table(4)
    delivery.fail(ValueError("first"), 2)
    delivery.fail(ValueError("second"), 1)
    assert not promise.done()
    delivery.delivered(0, 0, 1)
    with pytest.raises(DeliveryError, match="3 records were not delivered: first") as failed:
        promise.result()
    assert failed.value.record_count == 3


def test_a_promise_that_was_cancelled_is_left_alone() -> None:
    delivery, promise = table(1)
    promise.cancel()
    delivery.delivered(0, 0, 1)
    fail_promise(promise, ValueError())
    assert promise.cancelled()


def test_a_flush_waits_for_the_records_before_it_and_not_for_those_after_it() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        records = OpenRecords()
        records.counts[0] += 2
        first = records.begin_flush(loop)
        records.counts[records.generation] += 5
        records.close(0, 1)
        records.end_flushes()
        assert not first.done() and records.count == 6
        second = records.begin_flush(loop)
        records.close(0, 1)
        records.end_flushes()
        assert first.done() and not second.done() and 0 not in records.counts
        records.close(1, 5)
        records.end_flushes()
        assert second.done() and records.count == 0

    asyncio.run(scenario())


def test_failures_are_raised_once_with_their_number() -> None:
    records = OpenRecords()
    records.raise_failures()
    records.failed(ValueError("a"), 1)
    records.failed(ValueError("b"), 2)
    with pytest.raises(DeliveryError, match="3 records were not delivered: a"):
        records.raise_failures()
    records.raise_failures()
    records.failed(ValueError("c"), 1)
    records.forget_failures()
    records.raise_failures()
