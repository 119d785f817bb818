"""The file formats that `anabranch produce` reads, and the format of a file by its ending."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from anabranch.base.errors import AnabranchError


class Format(StrEnum):
    """The format of a file."""

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


def format_of(source: str, given: Format | None) -> Format:
    """Return the format that was given, else that of the file's ending; JSON lines for standard input (`-`)."""
    if given is not None:
        return given
    if source == "-":
        return Format.JSON
    ending = Path(source).suffix.lower()
    if ending not in ENDINGS:
        raise AnabranchError(
            f"The ending {ending!r} of {source!r} names no known format: expected one of {', '.join(ENDINGS)}. "
            "Give --format csv, json or parquet."
        )
    return ENDINGS[ending]
