"""A member of a group, without clock or socket: one machine for each group protocol.

`next` returns the next step for the network: send a request to the group's coordinator, run an assignor, or wait;
report its result with `on_response` or `on_error`. `take` returns the next event for the application, one at a time:
revoke, assign, or report lost partitions; confirm it with `done` (`event` returns the event without taking it).
After every call ask again. The network proceeds while the application handles an event.

The rule both machines keep: a member owns a partition from the moment its Assign is acknowledged until its Revoke or
Lost is acknowledged, and acknowledges a revocation to the coordinator only after the application has done so.
"""
