"""Decode in one thread while others allocate and free what lies beside it: `test_decode` runs it in a process."""

from __future__ import annotations

import threading

import pyarrow as pa

from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.encode import encode_partitioned

ROUNDS = 100
PATTERN = 0xA5


def main() -> None:
    keys = pa.array([b"key-%06d" % number for number in range(10_000)])
    (batch,) = encode_partitioned(keys, keys, 0, batch_size_max=1 << 30)
    wanted = decode(batch.data).records
    stop = threading.Event()
    damaged: list[int] = []

    def allocate() -> None:
        while not stop.is_set():
            held = [bytearray(bytes([PATTERN]) * size) for size in range(1_900, 2_500, 8) for _ in range(4)]
            damaged.extend(len(one) for one in held if one.count(PATTERN) != len(one))

    others = [threading.Thread(target=allocate) for _ in range(2)]
    for other in others:
        other.start()
    same = all(decode(batch.data).records.equals(wanted) for _ in range(ROUNDS))
    stop.set()
    for other in others:
        other.join()
    assert same and not damaged


if __name__ == "__main__":
    main()
