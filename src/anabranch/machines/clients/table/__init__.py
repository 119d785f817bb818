"""State by key beside a consumer: which keys' entries are in memory, and which changes a commit takes along.

A table holds one value for each key of a topic. Its changelog is a compacted topic with as many partitions as the topic
had at creation, one for each family of keys, and is never split: a partition of the topic is an interval of its
family's keys (`machines.keyspace`), and so is what a member loads.

**What is owned.** The keys whose records a member may be handed out: of partition p those of I(p, count[v]) as long as
p is processed within its segment of layout v, cut down to the member's share. A piece is an interval of them:

    LOADING -> READY                              `admit` asks for what is missing; `fill` and `loaded` complete it
      '----------'--> gone                        its partition, or a range of it, was revoked or lost (`release`,
                                                  `part`), or passed into a layout with fewer keys (`advance`)

A record is handed out only when all pieces of its segment are READY, and their load began when the record could have
been handed out: then its gate was open, and whatever earlier owners did to these keys is committed. An interval that
went and comes back is loaded again: somebody else may have changed it.

**What is flushed.** A change carries a mark: the least offset whose commit covers the record that made it. A commit of
offset S of a partition takes along, for each key of it, the last change with a mark of at most S, and no later one. So
the changelog and the committed offset always agree, in whatever order the work was finished; later changes stay until
their turn comes. The changes of a record that was not finished are undone. Changes of keys that go with a partition, or
with a range, are forgotten there and then: their records are not committed, so the next owner makes them again, and
what was kept of them would overwrite that when the keys come back.

That a member that has lost its keys writes nothing more is not decided here: changes and offsets are one transaction,
which the group's coordinator refuses to a member with an old epoch (docs/adr/0052).
"""

from anabranch.machines.clients.table.table import Table
from anabranch.machines.clients.table.values import KeyLoadingError, KeyNotOwnedError, Load, Piece, Write

__all__ = ["KeyLoadingError", "KeyNotOwnedError", "Load", "Piece", "Table", "Write"]
