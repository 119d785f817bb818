"""A member of a group, without clock or socket: one machine for each group protocol.

`next` says what the network is to do: send a request to the group's coordinator, run an assignor, or wait; what comes
of it is told with `on_response` or `on_error`. `take` says what the application is to do, one thing at a time: let go
of partitions, take some, or learn that some are lost; `done` says that it did (`event` only looks what it would be).
After every call ask again. The network goes on while the application works.

The rule both machines keep: a member owns a partition from the moment its Assign is acknowledged until its Revoke or
Lost is acknowledged, and tells the coordinator of a revocation only after the application acknowledged it.
"""
