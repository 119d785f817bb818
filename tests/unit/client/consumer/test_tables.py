from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from anabranch.client.consumer.tables import table_of
from anabranch.machines.clients.fetching import Deliverable, Fetched
from anabranch.machines.clients.fetching.places import place_of
from anabranch.machines.clients.key_ranges import Piece
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.lineage import Lineage
from tests.properties import record_model as model

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


KEYS = [None if number % 5 == 0 else b"k%d" % (number % 17) for number in range(60)]
LINEAGE = Lineage.of_ends(1, (1, 2), ({0: 40},))


def part_of(floor: Sequence[Piece]) -> Deliverable:
    """Records with and without keys, in two layouts."""
    rows = [model.Row(offset, 1, key, b"v") for offset, key in enumerate(KEYS)]
    batches = [model.Batch(at, tuple(rows[at : at + 10]), leader_epoch=0) for at in range(0, len(rows), 10)]
    data = memoryview(b"".join(model.encode(batch) for batch in batches))
    return Deliverable("t", 0, Fetched(data, len(rows)), 0, len(rows), floor)


@pytest.mark.parametrize("key_range", [None, (0, SPACE_END // 2), (SPACE_END // 2 + 1, SPACE_END)])
@pytest.mark.parametrize("steps", [1, 2, 50])
def test_a_fetch_is_sifted_by_the_floor_of_each_key(steps: int, key_range: tuple[int, int] | None) -> None:
    size = (SPACE_END + 1) // steps
    bounds = [(at * size, SPACE_END if at == steps - 1 else (at + 1) * size - 1) for at in range(steps)]
    floor = [(start, end, 7 + 11 * (at % 4)) for at, (start, end) in enumerate(bounds)]
    found = table_of([part_of(floor)], ("offset",), key_range, {"t": LINEAGE}, check_crcs=True)

    def is_wanted(offset: int) -> bool:
        place = place_of(LINEAGE, 0, KEYS[offset], offset)
        within = key_range is None or key_range[0] <= place <= key_range[1]
        return within and all(offset >= at for start, end, at in floor if start <= place <= end)

    assert found.column("offset").to_pylist() == [offset for offset in range(len(KEYS)) if is_wanted(offset)]
