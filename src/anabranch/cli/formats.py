"""The file formats that `anabranch produce` reads, told apart without opening anything."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from anabranch.base.errors import AnabranchError


class Format(StrEnum):
    """What a file holds; told by its ending where it is not said."""

    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


ENDINGS = {
    ".csv": Format.CSV,
    ".json": Format.JSON,
    ".jsonl": Format.JSON,
    ".ndjson": Format.JSON,
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
}


def format_of(source: str, said: Format | None) -> Format:
    """Tell a file's format from what was said, else from its ending."""
    if said is not None:
        return said
    if source == "-":
        return Format.JSON
    ending = Path(source).suffix.lower()
    if ending not in ENDINGS:
        raise AnabranchError(
            f"Cannot tell what {source!r} holds from its ending {ending!r}: expected one of {', '.join(ENDINGS)}. "
            "Say --format csv, json or parquet."
        )
    return ENDINGS[ending]
