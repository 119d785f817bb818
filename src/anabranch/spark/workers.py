"""The Python workers of a session: whether they can run the data source at all.

Spark starts `PYSPARK_PYTHON`, by default the first `python3` of the path, to plan and to run tasks. Where that is
another Python than the driver's, the package may be missing, and all that a query would show is a ModuleNotFoundError.
On the driver's machine `check_workers` looks before the first query. What executors find under the same name is known
there only: so what is sent to them is `Sent` inside of a function that needs nothing but PySpark.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle
from pyspark.errors import PySparkImportError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IMPORTED = "anabranch.spark.reader"
"""What a worker needs beside PySpark, which Spark gives it."""
TIMEOUT_S = 60
DAEMON = "pyspark.daemon"
"""The program that Spark starts, and of which workers are forks."""


def check_workers(spark: SparkSession) -> None:
    """Raise `PySparkImportError` if the workers that this driver starts cannot import the data source.

    A session of Spark Connect starts its workers elsewhere, and is not checked.
    """
    context = getattr(spark, "_sc", None)
    if context is not None:
        why = why_not(context.pythonExec, context.environment)
        if why:
            raise PySparkImportError(
                message=f"PYSPARK_PYTHON: the Python workers of this session run {context.pythonExec}, which cannot "
                f"import {IMPORTED}: {why}. Set PYSPARK_PYTHON to a Python that has this package, such as "
                f"{sys.executable}, before the session is started."
            )


def why_not(python: str, environment: Mapping[str, str]) -> str:
    """Say why a Python cannot import the data source; empty if it can. `environment`: what Spark adds for workers."""
    found = shutil.which(python)
    if found is None:
        return "there is no such program"
    if os.path.abspath(found) == os.path.abspath(sys.executable):
        return ""
    try:
        done = subprocess.run(
            [found, "-c", f"import {IMPORTED}"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"it ends with code {done.returncode}")


class Sent:
    """Base of what is sent to executors: where it cannot be imported, `PySparkImportError` says what is missing."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the object as a call of `_received`."""
        return _received, (cloudpickle.dumps((type(self), self.__dict__)),)  # type: ignore[no-untyped-call]


def _received(pickled: bytes) -> Any:
    """Unpickle an object in a process that may not have its class."""
    import platform
    import sys

    from pyspark import cloudpickle
    from pyspark.errors import PySparkImportError

    try:
        kind, attributes = cloudpickle.loads(pickled)
    except ImportError as error:
        raise PySparkImportError(
            message=f"PYSPARK_PYTHON: the Python workers on {platform.node()} run {sys.executable} "
            f"({platform.python_version()}), which cannot import the data source: {error}. Install anabranch there "
            "with what it depends on, as on the driver, or ship a Python that has both (spark.archives), and set "
            "PYSPARK_PYTHON to it before the session is started."
        ) from None
    made = kind.__new__(kind)
    made.__dict__.update(attributes)
    return made


_received.__module__ = "__main__"  # So that it is pickled whole, not by a name that would have to be imported.


@cache
def set_imports_aside() -> None:
    """Have the garbage collections of a worker pass over what it has imported: 70,000 objects, 30 ms each time.

    PySpark's daemon has each worker collect after every task, and the next task waits for that. Elsewhere, as in
    drivers, nothing is done, and so it is from the second call on.
    """
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == DAEMON:
        gc.freeze()
