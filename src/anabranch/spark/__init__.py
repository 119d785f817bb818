"""The data source for Spark: every key in order through every resize (docs/spark.md).

from anabranch.spark import register

register(spark)
spark.readStream.format("anabranch").option("kafka.bootstrap.servers", "localhost:9092") ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make the format `anabranch` known to a session, and let it push filters down to Python data sources.

    Raises `PySparkImportError` if the Python of the session's workers (`PYSPARK_PYTHON`) does not have this package.
    """
    from anabranch.spark.source import PUSHDOWN, FilteringDataSource
    from anabranch.spark.workers import check_workers

    check_workers(spark)
    if spark.conf.get(PUSHDOWN, "false") != "true":  # A declarative pipeline sets it in its specification.
        spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(FilteringDataSource)
