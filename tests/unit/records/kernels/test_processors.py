"""Kernels do the same on every processor, and are compiled on their first call."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from anabranch.records.arrow.decode import COLUMN_TYPES, decode
from anabranch.records.arrow.encode import encode_records
from anabranch.records.arrow.warm import warm
from anabranch.records.kernels.decode import decode_records
from anabranch.records.kernels.encode import encode_batches
from tests.support.records import RECORDS
from tests.support.thorough import THOROUGH


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


def test_kernels_are_not_compiled_when_they_are_imported() -> None:
    # A fresh interpreter would prove it too, but the dispatchers say it cheaper: they compile by signature, on call.
    assert all(len(kernel.signatures) == 1 for kernel in (decode_records, encode_batches))


@pytest.mark.skipif(not THOROUGH, reason="all kernels are compiled for half a minute: make simulate")
def test_any_processor_reads_and_writes_the_same() -> None:
    code = """
from anabranch.records.kernels import crc32c, memory
from tests.unit.records.kernels.test_processors import written_and_read
assert not (crc32c.CHECKS_CRC or crc32c.FOLDS_CRC or memory.SQUEEZES)
print(written_and_read())
"""
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (written_and_read() + "\n", 0), done.stderr[-2000:]


def written_and_read() -> str:
    data = encode_records(RECORDS)
    return f"{bytes(data).hex()} {decode(data, columns=tuple(COLUMN_TYPES)).records.to_pylist()}"
