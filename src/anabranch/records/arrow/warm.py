"""All kernels compiled, or loaded, before they are needed: `python -m anabranch.records.arrow.warm`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from anabranch.records.arrow.decode import COLUMN_TYPES, decode
from anabranch.records.arrow.encode import encode_partitioned, hash_keys
from anabranch.records.batch import OFFSET_MAX
from anabranch.records.shares import KeyShare


def warm() -> None:
    """Load every kernel from the cache, or compile it."""
    keys = pa.array([b"a", None])
    headers = pa.array([[{"key": "k", "value": b"v"}], []], COLUMN_TYPES["headers"])
    hash_keys(keys)
    batches = encode_partitioned(keys, keys, 0, headers, np.array((1, 0), np.int32))
    decode(batches[0].data, columns=tuple(COLUMN_TYPES), share=KeyShare((0, OFFSET_MAX), 1, (0, OFFSET_MAX)))


if __name__ == "__main__":
    warm()
