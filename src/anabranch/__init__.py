"""Anabranch: elastic, key-ordered streams for Python and Spark, on the Kafka protocol.

The layers, low to high, each importing only lower ones: base, codec, protocol, records, machines (pure: no clock,
socket, disk, chance or log), runtime (the only door to the operating system), storage, server, client, spark, cli.
"""

__version__ = "0.1.0"
