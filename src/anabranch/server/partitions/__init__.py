"""The partitions on this broker: their logs, roles, appends and fetches."""
