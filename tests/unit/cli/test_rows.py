"""Files as columns of keys and values."""

from __future__ import annotations

import datetime
import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.base.errors import AnabranchError
from anabranch.cli.formats import Format, format_of
from anabranch.cli.rows import read_rows
from anabranch.records.arrow.json_rows import json_objects


def read(source: str, file_format: Format, key: str | None) -> tuple[list[str | None], list[object]]:
    keys: list[str | None] = []
    values: list[object] = []
    for rows in read_rows(source, file_format, key):
        keys += [None] * len(rows.values) if rows.keys is None else rows.keys.to_pylist()
        values += [json.loads(value) for value in rows.values.to_pylist()]
    return keys, values


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": st.none() | st.text(st.characters(exclude_categories=["Cs"])),
                "number": st.none() | st.integers(-(2**63), 2**63 - 1),
                "real": st.none() | st.floats(allow_nan=False, allow_infinity=False),
                "flag": st.none() | st.booleans(),
                'quoted "name"': st.none() | st.integers(0, 9),
            }
        ),
        min_size=1,
        max_size=20,
    )
)
def test_rows_become_json_objects_that_say_the_same(rows: list[dict[str, object]]) -> None:
    schema = pa.schema(
        {
            "text": pa.string(),
            "number": pa.int64(),
            "real": pa.float64(),
            "flag": pa.bool_(),
            'quoted "name"': pa.int8(),
        }
    )
    batch = pa.RecordBatch.from_pylist(rows, schema)
    assert [json.loads(text) for text in json_objects(batch).to_pylist()] == rows


def test_values_that_json_has_no_word_for() -> None:
    when = datetime.datetime(2013, 1, 1, 5, 15)
    batch = pa.record_batch(
        {
            "nan": pa.array([float("nan")]),
            "when": pa.array([when]),
            "bytes": pa.array([b"\xff\x00"]),
            "list": pa.array([[1, None]]),
            "category": pa.array(["a"]).dictionary_encode(),
            "nothing": pa.nulls(1),
        }
    )
    row = json.loads(json_objects(batch)[0].as_py())
    assert row["nan"] is None
    assert row["when"].startswith("2013-01-01 05:15:00")
    assert row["list"] == [1, None]
    assert row["category"] == "a"
    assert row["nothing"] is None


def test_csv_json_lines_and_parquet_give_the_same(tmp_path: Path) -> None:
    table = pa.table({"tail": ["N1", None, "N3"], "delay": [5, -2, None]})
    expected = (["N1", None, "N3"], [{"tail": t, "delay": d} for t, d in zip(*table.to_pydict().values(), strict=True)])
    pa.parquet.write_table(table, tmp_path / "f.parquet")
    (tmp_path / "f.json").write_text("\n".join(json.dumps(row) for row in table.to_pylist()))
    assert read(str(tmp_path / "f.parquet"), Format.PARQUET, "tail") == expected
    assert read(str(tmp_path / "f.json"), Format.JSON, "tail") == expected
    (tmp_path / "f.csv").write_text("tail,delay\nN1,5\nN2,-2\n")
    assert read(str(tmp_path / "f.csv"), Format.CSV, "tail") == (
        ["N1", "N2"],
        [{"tail": "N1", "delay": 5}, {"tail": "N2", "delay": -2}],
    )


def test_json_lines_pass_as_they_stand_with_keys_of_any_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = b'{"k": 7, "x": [1,  2]}\r\n\n{"k": "a", "x": {"y": null}}\n{"x": 1}'

    class Stdin:
        buffer = io.BytesIO(text)

    monkeypatch.setattr(sys, "stdin", Stdin)
    rows = list(read_rows("-", Format.JSON, "k"))
    assert [key for part in rows for key in (part.keys.to_pylist() if part.keys is not None else [])] == [
        "7",
        "a",
        None,
    ]
    assert [value for part in rows for value in part.values.to_pylist()] == [
        '{"k": 7, "x": [1,  2]}',
        '{"k": "a", "x": {"y": null}}',
        '{"x": 1}',
    ]


def test_a_large_file_comes_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    count = 300_000
    path.write_text("".join(f'{{"k": "{i % 97}", "n": {i}}}\n' for i in range(count)))
    keys, values = read(str(path), Format.JSON, "k")
    assert len(keys) == count
    assert [value["n"] for value in values if isinstance(value, dict)] == list(range(count))


@pytest.mark.parametrize(
    ("text", "ending", "key", "says"),
    [
        ('{"a": 1}\n{"a": 2\n', ".json", None, "line 2"),
        ('{"a": 1}\n[2]\n', ".json", "a", "line 2"),
        ('{"a": 1}\n', ".json", "tail", "no row has a field 'tail'"),
        ("a,b\n1,2\n", ".csv", "tail", "the columns are a, b"),
        ("a,b\n1,2\n3\n", ".csv", "a", "Expected 2 columns"),
        ("no parquet", ".parquet", "a", "not readable as parquet"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path: Path, text: str, ending: str, key: str | None, says: str) -> None:
    path = tmp_path / f"bad{ending}"
    path.write_text(text)
    with pytest.raises(AnabranchError, match=says):
        read(str(path), format_of(str(path), None), key)


def test_a_file_that_is_not_there_and_an_ending_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(AnabranchError, match="does not exist"):
        read(str(tmp_path / "none.csv"), Format.CSV, None)
    with pytest.raises(AnabranchError, match="Give --format"):
        format_of("flights.xlsx", None)
