"""State per key for Spark, with the rows of each key in order and applied once (docs/spark.md, "Keyed state").

    results = flights.transform(keyed(follow, state=Aircraft, output="tailnum string, legs long"))

A key belongs to a bucket by its hash. Rows cross Spark packed, one Arrow message for each bucket, and a bucket's
state is one Arrow table, so that neither Spark nor this package runs Python per row. A micro-batch does this:

    rows --pack--> (bucket, message) --group by bucket--> `step` with the bucket's state --unpack--> results

`rows`, `state`, `bucket` and `packing` decide and are pure; `operator` is the shell around Spark's
`applyInPandasWithState`.
"""

from __future__ import annotations

from anabranch.spark.keyed.bucket import KeyState, Returned, Timeout
from anabranch.spark.keyed.errors import KeyedError
from anabranch.spark.keyed.operator import keyed

__all__ = ["KeyState", "KeyedError", "Returned", "Timeout", "keyed"]
