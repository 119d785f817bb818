from __future__ import annotations

import subprocess
import sys

import pytest

READ = """
import sys
from anabranch.machines.clients.fetching import Fetched, Deliverable
from anabranch.client.consumer.tables import table_of
from anabranch.records.batch import build

records = bytes.fromhex("10 00 00 00 02 61 02 62 00")
data = memoryview(bytes(build(records, record_count=1, base_timestamp=5, max_timestamp=5, base_offset=7)))
part = Deliverable("flights", 3, Fetched(data, 8), 7, 8)
columns = ("topic", "partition", "offset", "timestamp", "key", "value")
table = table_of([part], columns, None, {}, check_crcs=False)
assert 'pandas' not in sys.modules
(row,) = table.to_pylist()
assert (row["topic"], row["partition"], row["offset"], row["key"]) == ("flights", 3, 7, b"a"), row
"""
READ_BY_SPARK = """
import sys
from anabranch.records.batch import build
from anabranch.records.arrow.decode import decode
from anabranch.spark.plan import Read
from anabranch.spark.reader import _Columns

records = bytes.fromhex("10 00 00 00 02 61 02 62 00")
data = bytes(build(records, record_count=1, base_timestamp=5, max_timestamp=5, base_offset=7))
columns = _Columns(("topic", "partition", "offset", "timestamp", "sequence"))
batch = columns.batch(decode(data, columns=columns.decoded).records, Read("flights", 3, 7, 8, (9,), (1, 2)))
assert 'pandas' not in sys.modules
(row,) = batch.to_pylist()
assert (row["topic"], row["partition"], row["offset"], row["sequence"]) == ("flights", 3, 7, 1 << 48 | 7), row
assert row["timestamp"].microsecond == 5_000, row
"""


@pytest.mark.parametrize("script", [READ, READ_BY_SPARK], ids=["client", "spark"])
def test_records_are_read_without_pandas(script: str) -> None:
    """It takes a third of a second to import, which every command and every worker of Spark would wait for."""
    subprocess.run([sys.executable, "-c", script], check=True)
