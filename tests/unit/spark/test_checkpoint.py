"""Checkpoints of Spark's Kafka source as Spark writes them, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.spark.checkpoint import CheckpointError, kafka_offsets, read, write
from anabranch.spark.options import OptionError, parse
from anabranch.spark.plan import TopicOffsets, offsets_from_json
from anabranch.spark.source import StreamReader, full_schema

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1795407257237,"conf":{"spark.sql.shuffle.partitions":"2"}}'


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Two micro-batches of two Kafka sources and a file source; the second one is not committed."""
    path = tmp_path / "old"
    for name, text in {
        "metadata": '{"id":"7c7eafd3-6f66-4b93-a088-efabc5b48859"}',
        "offsets/0": f'v1\n{METADATA}\n{{"t":{{"0":620,"1":380}}}}\n{{"logOffset":0}}\n-',
        "offsets/.0.crc": "crc",
        "offsets/1": f'v1\n{METADATA}\n{{"t":{{"0":700,"1":381}}}}\n{{"logOffset":1}}\n{{"u":{{"0":5}},"v":{{}}}}',
        "offsets/.1.crc": "crc",
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
        "sources/0/0": '\0v1\n{"t":{"0":0,"1":0}}',
        "state/0/0/1.delta": "\x00state",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def test_offsets_of_kafka_sources_are_converted_and_all_else_is_kept(old: Path, tmp_path: Path) -> None:
    found = read(old)
    assert (found.sources, found.unfinished) == ((0, 2), 1)
    assert found.positions == {"t": {0: 700, 1: 381}, "u": {0: 5}, "v": {}}
    before = {file: file.read_bytes() for file in old.rglob("*") if file.is_file()}
    new = tmp_path / "new"
    write(found, new, {"t": "ab12", "u": "cd34"}, {"t": 3, "u": 1})
    first, second = ((new / "offsets" / name).read_text().split("\n") for name in "01")
    assert first[:2] == second[:2] == ["v1", METADATA]
    assert offsets_from_json(json.loads(first[2])) == {"t": TopicOffsets({0: 620, 1: 380}, "ab12", 3)}
    assert first[3:] == ['{"logOffset":0}', "-"] and second[3] == '{"logOffset":1}'
    assert offsets_from_json(json.loads(second[4])) == {"u": TopicOffsets({0: 5}, "cd34", 1), "v": TopicOffsets({})}
    kept = {file.relative_to(old): data for file, data in before.items() if file.parent.name != "offsets"}
    assert {file: (new / file).read_bytes() for file in kept} == kept
    assert sorted(file.name for file in (new / "offsets").iterdir()) == ["0", "1"], "no checksum of what was there"
    assert {file: file.read_bytes() for file in before} == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new", "old"]


def test_a_checkpoint_whose_last_micro_batch_is_committed_has_none_unfinished(old: Path) -> None:
    (old / "commits" / "1").write_text('v1\n{"nextBatchWatermarkMs":0}')
    assert read(old).unfinished is None


@pytest.mark.parametrize(
    ("line", "offsets"),
    [
        ('{"t":{"0":5}}', {"t": {0: 5}}),
        ('{"t":{"0":5.5}}', None),
        ('{"t":{"0":true}}', None),
        ('{"t":{"id":"x","layouts":1,"offsets":{"0":5},"seen":{}}}', None),
        ('{"logOffset":5}', None),
        ("{}", None),
        ("17", None),
        ("-", None),
    ],
)
def test_what_is_an_offset_of_the_kafka_source(line: str, offsets: dict[str, dict[int, int]] | None) -> None:
    assert kafka_offsets(line) == offsets


def test_what_cannot_be_converted_is_refused(old: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"old/offsets is not the checkpoint of a streaming query"):
        read(old / "offsets")
    with pytest.raises(CheckpointError, match="old exists already"):
        write(read(old), old, {}, {})
    write(read(old), tmp_path / "new", {}, {})
    with pytest.raises(CheckpointError, match=r"No source of .*new is Spark's Kafka source"):
        read(tmp_path / "new")
    (old / "offsets" / "1").write_text("v2\n{}\n")
    with pytest.raises(CheckpointError, match="offsets/1 has version 'v2'"):
        read(old)
    (old / "offsets" / "1").unlink()
    (old / "commits" / "0").unlink()
    with pytest.raises(CheckpointError, match=r"No micro-batch of .*old was finished: start the query anew"):
        read(old)


@pytest.mark.parametrize(
    ("offset", "says"),
    [
        ({"t": {"0": 23, "1": 40}}, "Spark's own Kafka source. .* convert-checkpoint OLD NEW -b localhost:9092"),
        ({"logOffset": 3}, "an offset of another source: {'logOffset': 3}"),
        ({"t": {"id": "", "layouts": 1}}, "an offset of another source"),
    ],
    ids=str,
)
def test_a_query_on_a_checkpoint_of_another_source_says_so(offset: dict[str, object], says: str) -> None:
    options = parse({"kafka.bootstrap.servers": "localhost:9092", "subscribe": "t"})
    reader = StreamReader(options, full_schema(headers=False))
    with pytest.raises(OptionError, match=says):
        reader.latestOffset(offset, reader.getDefaultReadLimit())
    with pytest.raises(OptionError, match=says):
        reader.partitions(offset, offset)
