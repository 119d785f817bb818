"""The Kafka protocol: every message, the registry of APIs and versions, and the sans-I/O frame splitter."""
