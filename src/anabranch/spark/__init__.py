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
    """Make the format `anabranch` known to a session, and let it push filters down to Python data sources."""
    from anabranch.spark.source import PUSHDOWN, FilteringDataSource

    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(FilteringDataSource)
