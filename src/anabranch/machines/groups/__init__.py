"""The group coordinator (groups.md): two protocols and committed offsets, one state machine per `__consumer_offsets`
partition.
"""
