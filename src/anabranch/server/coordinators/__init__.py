"""The group and transaction coordinators: shards over the partitions of their topics."""
