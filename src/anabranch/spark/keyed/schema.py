"""The fields of a state or an output, as a user writes them: a `NamedTuple` class, an Arrow schema, or Spark's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from anabranch.spark.keyed.errors import KeyedError

Fields: TypeAlias = Any
"""A NamedTuple class, an Arrow schema, or (as text or `StructType`) a schema of Spark."""
TYPES: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    date: pa.date32(),
    datetime: pa.timestamp("us", "UTC"),
}


def to_arrow(fields: Fields) -> pa.Schema:
    """Return the Arrow schema of fields. Raises `KeyedError` for a type without one."""
    if isinstance(fields, pa.Schema):
        return fields
    if isinstance(fields, type) and issubclass(fields, tuple) and hasattr(fields, "_fields"):
        hints = get_type_hints(fields)
        return pa.schema(
            [pa.field(name, _arrow_type(hints[name], f"{fields.__name__}.{name}")) for name in fields._fields]
        )
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    parsed = StructType.fromDDL(fields) if isinstance(fields, str) else fields
    if not isinstance(parsed, StructType):
        raise KeyedError(f"Give fields as a NamedTuple class, a pyarrow.Schema or a schema of Spark, not {fields!r}.")
    return to_arrow_schema(parsed, timezone="UTC")


def maker(fields: Fields) -> Callable[[tuple[Any, ...]], Any]:
    """Return what builds a value of the fields: the NamedTuple's, or a plain tuple."""
    return fields._make if isinstance(fields, type) and hasattr(fields, "_make") else tuple


def _arrow_type(hint: Any, name: str) -> pa.DataType:
    if hint in TYPES:
        return TYPES[hint]
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        kinds = [each for each in arguments if each is not NoneType]
        if len(kinds) == 1:
            return _arrow_type(kinds[0], name)
    if get_origin(hint) is list:
        return pa.list_(_arrow_type(arguments[0], name))
    known = ", ".join(kind.__name__ for kind in TYPES)
    raise KeyedError(f"{name} has type {hint}; it must be {known}, a list of these, or one of these or None.")
