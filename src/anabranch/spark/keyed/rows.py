"""Which rows of a micro-batch are applied, and in which order.

`sequence` (layout << 48 | offset) grows with every record of a partition, and with every record of a key whose
producers agree about its partition, across resizes. Two topics have sequences of their own, and so do two partitions
within one layout: a key lies in both if a producer has not heard of the resize, or places keys in its own way. So rows
are applied by key, then by topic, then by sequence, and a row is applied if its sequence is above the last one applied
of its key, topic and partition. A repeated row is skipped, in the same micro-batch or in a later one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.records.arrow.memory import as_numbers
from anabranch.spark.keyed.errors import KeyedError

Numbers = npt.NDArray[np.int64]
NOTHING_APPLIED = -1
RADIX_MAX = 1 << 16
"""Codes below this bound are sorted in linear time, as 16-bit numbers."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns that say whose a row is and when its turn comes."""

    key: str = "key"
    sequence: str = "sequence"
    topic: str | None = "topic"
    """None: all rows are of one topic."""
    partition: str | None = "partition"
    """None: in every layout, all rows of a key are of one partition."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Rows with their keys and topics as numbers."""

    rows: pa.RecordBatch
    distinct: pa.Array
    """The keys, each once."""
    keys: Numbers
    """The index in `distinct` of every row's key."""
    topic_names: tuple[str, ...]
    """In order: the topics of a key come one after the other."""
    topics: Numbers
    """The index in `topic_names` of every row's topic."""
    partitions: Numbers
    sequences: Numbers


def code(rows: pa.RecordBatch, columns: Columns) -> Coded:
    """Number the keys and topics of rows. Raises `KeyedError` for a row without key, topic, partition or sequence."""
    for name in (columns.key, columns.topic, columns.partition, columns.sequence):
        if name is not None and rows.column(name).null_count:
            raise KeyedError(f"The column {name} of a row is null: select rows with .where('{name} is not null').")
    keys = rows.column(columns.key).dictionary_encode()
    names: tuple[str, ...] = ("",)
    topics = np.zeros(rows.num_rows, np.int64)
    if columns.topic is not None:
        coded = rows.column(columns.topic).dictionary_encode()
        found = coded.dictionary.to_pylist()
        names = tuple(sorted(found))
        topics = np.asarray([names.index(name) for name in found], np.int64)[_int64(coded.indices)]
    partitions = np.zeros(rows.num_rows, np.int64)
    if columns.partition is not None:
        partitions = _int64(rows.column(columns.partition))
    sequences = _int64(rows.column(columns.sequence))
    return Coded(rows, keys.dictionary, _int64(keys.indices), names, topics, partitions, sequences)


def _int64(column: pa.Array) -> Numbers:
    return as_numbers(column.cast(pa.int64()))


def order_of_new(keys: Numbers, topics: Numbers, partitions: Numbers, sequences: Numbers, applied: Numbers) -> Numbers:
    """Return the indices of the rows to apply, by key, topic, sequence and partition; of equal rows the first.

    `applied` is, for every row, the last sequence applied of its key, topic and partition, or `NOTHING_APPLIED`.
    """
    new = np.flatnonzero(sequences > applied)
    keys, topics, partitions, sequences = keys[new], topics[new], partitions[new], sequences[new]
    groups = keys * (int(topics.max(initial=0)) + 1) + topics
    small = int(groups.max(initial=0)) < RADIX_MAX
    order = np.argsort(groups.astype(np.uint16) if small else groups, kind="stable")
    same = np.diff(groups[order]) == 0
    steps, sides = np.diff(sequences[order]), np.diff(partitions[order])
    if np.any(same & ((steps < 0) | ((steps == 0) & (sides < 0)))):
        order = np.lexsort((partitions, sequences, groups))
        steps, sides = np.diff(sequences[order]), np.diff(partitions[order])
    first = np.ones(len(order), np.bool_)
    first[1:] = ~(same & (steps == 0) & (sides == 0))
    return np.asarray(new[order[first]], np.int64)


def runs(values: Numbers) -> Numbers:
    """Return where each run of equal values begins, and behind the last one the number of values."""
    if not len(values):
        return np.zeros(1, np.int64)
    return np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1, [len(values)])).astype(np.int64)
