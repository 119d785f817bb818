"""When Spark planned a micro-batch, by the checkpoint of its query."""

from __future__ import annotations

from pathlib import Path

from anabranch.spark.sink.planned import planned_ms

PLANNED_MS = 1_795_761_854_373


def test_when_a_micro_batch_was_planned_is_in_the_checkpoint_of_its_query(tmp_path: Path) -> None:
    plan = f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":{PLANNED_MS},"conf":{{}}}}\n{{"t":{{"0":5}}}}'
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text('{"id":"4f00"}')
    (tmp_path / "offsets" / "7").write_text(plan)
    for text in ("", "v1", "v1\n-", "v1\n[]", "v1\n{}", 'v1\n{"batchTimestampMs":0}', 'v1\n{"batchTimestampMs":"x"}'):
        (tmp_path / "offsets" / "8").write_text(text)
        assert planned_ms(str(tmp_path), "4f00", 8) is None
    for place in (str(tmp_path), f"file:{tmp_path}", f"file://{tmp_path}"):
        assert planned_ms(place, "4f00", 7) == PLANNED_MS
        assert planned_ms(place, "4f01", 7) is None, "it is that of another query"
        assert planned_ms(place, "4f00", 6) is None
    for elsewhere in (None, f"hdfs://{tmp_path}", f"s3a:{tmp_path}", f"file://host{tmp_path}", f"{tmp_path}/no"):
        assert planned_ms(elsewhere, "4f00", 7) is None
