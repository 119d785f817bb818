"""What a worker makes of options and of decoded records."""

from __future__ import annotations

from traceback import format_exception
from typing import Any

import pyarrow as pa
import pytest

from anabranch.records.arrow.decode import COLUMN_TYPES
from anabranch.spark.options import parse
from anabranch.spark.plan import Read, Task
from anabranch.spark.reader import ARROW_TYPES, ReadSettings, _Columns, read_task

NOBODY = "127.0.0.1:1"


def test_each_query_in_a_worker_has_its_own_time_limit() -> None:
    for timeout_ms in ("20", "40", "20"):
        given = {"kafka.bootstrap.servers": NOBODY, "subscribe": "t", "kafkaConsumer.pollTimeoutMs": timeout_ms}
        with pytest.raises(ConnectionError) as failed:
            list(read_task(Task((Read("t", 0, 0, 9),)), ReadSettings(parse(given), ("value",))))
        said = "".join(format_exception(failed.value))
        assert f"Tried for {timeout_ms} ms (kafkaConsumer.pollTimeoutMs)." in said


@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(1, 4), slice(3, 3), slice(10, 17)])
def test_headers_are_null_where_a_record_has_none(part: slice) -> None:
    some: list[Any] = [[], [{"key": "a", "value": b"1"}], [], [{"key": "b", "value": None}, {"key": "b", "value": b""}]]
    headers = (some * 5)[part]
    records = pa.RecordBatch.from_arrays([pa.array(some * 5, COLUMN_TYPES["headers"])], names=["headers"])[part]
    column = _Columns(("headers",)).batch(records, Read("t", 0, 0, 9)).column("headers")
    column.validate(full=True)
    assert column.type == ARROW_TYPES["headers"]
    assert column.to_pylist() == [each or None for each in headers]
    assert column.null_count == headers.count([])
