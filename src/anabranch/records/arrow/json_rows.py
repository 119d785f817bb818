"""Rows of Arrow columns as JSON objects, as text: column work, without Python per row but for nested values.

Numbers, booleans and text keep JSON's own forms; NaN and infinities are null; times are text; bytes are UTF-8 text.
"""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.compute as pc


def json_objects(batch: pa.RecordBatch) -> pa.Array:
    """Write every row of a batch as one JSON object, as text, column by column."""
    pieces: list[pa.Array | pa.Scalar] = []
    for index, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        pieces.append(pa.scalar(("{" if index == 0 else ",") + _quoted(name) + ":"))
        pieces.append(_json_values(column))
    if not pieces:
        return pa.array(["{}"] * batch.num_rows, pa.string())
    pieces.append(pa.scalar("}"))
    return pc.binary_join_element_wise(*pieces, pa.scalar(""))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_values(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _json_values(column.dictionary_decode())
    if pa.types.is_null(kind):
        return pa.array(["null"] * len(column), pa.string())
    if pa.types.is_floating(kind):
        text = column.cast(pa.string())
        text = pc.if_else(pc.is_finite(column), text, pa.scalar("null"))
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        text = column.cast(pa.string())
    elif pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        text = pa.array([_json_of(value) for value in column.to_pylist()], pa.string())
    else:
        text = _escaped(column.cast(pa.string()))
    return pc.fill_null(text, "null")


def _json_of(value: object) -> str | None:
    return None if value is None else json.dumps(value, default=_text_of, ensure_ascii=False)


def _text_of(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _escaped(text: pa.Array) -> pa.Array:
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        if pc.any(pc.match_substring(text, plain)).as_py():
            text = pc.replace_substring(text, plain, escaped)
    if pc.any(pc.match_substring_regex(text, "[\\x00-\\x1f]")).as_py():
        return pa.array([_json_control(value) for value in text.to_pylist()], pa.string())
    quote = pa.scalar('"')
    return pc.binary_join_element_wise(quote, text, quote, pa.scalar(""))


def _json_control(escaped: str | None) -> str | None:
    if escaped is None:
        return None
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'
