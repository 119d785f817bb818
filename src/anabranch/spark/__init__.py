"""Elastic topics as a Spark data source, in key order (spark.md)."""
