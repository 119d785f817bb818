"""Records whose pages a disk cannot read any more are an OSError for who reads them in a thread, not a signal.

Pages behind the end of a file are as those. What would end the process runs in one of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, pathlib, sys
from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_LEADER_EPOCH
from anabranch.records.batch import end_transaction_marker, parse_header
from anabranch.server.coordinators.bulk_replay import BulkReplay
from anabranch.server.coordinators.replay import Replay
from anabranch.server.partitions.checks import BatchChecks
from anabranch.server.partitions.offsets import MAX_TIMESTAMP, list_offset
from anabranch.server.partitions.partition import fold_producers
from anabranch.storage.log.log_slice import LogSlice
from anabranch.storage.next_record import scan
from tests.support.batches import make_keyed_batch
from tests.support.replicas import NOW_MS, LocalReplicas

local = LocalReplicas(pathlib.Path(sys.argv[1]))
local.resize(1)
for _ in range(40):
    data = make_keyed_batch([(b"key", bytes(10_000))] * 3, timestamp=NOW_MS)
    local[0].append(data, parse_header(data), NOW_MS)
marker = end_transaction_marker(7, 0, commit=False, coordinator_epoch=0, timestamp_ms=NOW_MS)
local[0].append(marker, parse_header(marker), NOW_MS)
whole = LogSlice.view

def view(piece):
    found = whole(piece)
    os.ftruncate(piece.fd, 0)
    return found

def at(timestamp):
    searches = BatchChecks().searches(1)
    return local.runner.run(list_offset(local[0], timestamp, NO_LEADER_EPOCH, searches, committed=False))

LogSlice.view = view
try:
    found = READ
except OSError as error:
    found = error.strerror
assert found in (ErrorCode.KAFKA_STORAGE_ERROR, "mapped bytes of a file cannot be read"), found
os._exit(0)
"""


@pytest.mark.parametrize(
    "read",
    [
        "at(NOW_MS)",
        "at(MAX_TIMESTAMP)",
        "scan(local[0].log.read(0, 1 << 20), 0)",
        "list(Replay().scan(local[0].log.slices()))",
        "list(BulkReplay().scan(local[0].log.slices()))",
        "fold_producers(local[0].log, NOW_MS)",
    ],
)
def test_pages_that_cannot_be_read_end_no_broker(tmp_path: Path, read: str) -> None:
    code = BEGIN.replace("READ", read)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
