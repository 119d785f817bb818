"""The producer's decisions, without clock or socket: the batches to send to each partition, and their sequences.

Records arrive as rows of a topic, in order. They wait in the topic's backlog, are placed and encoded into batches under
one placement (`Encode`), and a batch then goes through

    FRESH ── sent ──► SENT ── appended ──► delivered             FRESH: nothing of the batch is in any log
      ▲                │ └──── refused for good ──► failed        SENT: on the wire
      └── rejected ────┤                                          UNCERTAIN: the response was lost; may be in the log
                       └─ no response ─► UNCERTAIN ── sent ──► SENT (same partition, same sequence)

The rule (ordering.md, section 5): every placed record of a topic is placed under one and the same count, and is moved
to another partition only while FRESH. So a new count first empties SENT and UNCERTAIN, then places all records anew.
`placing` keeps that rule, `departing` chooses the batches to send, `outcomes` interprets the broker's results.
"""

from anabranch.machines.clients.sending.batcher import Batcher
from anabranch.machines.clients.sending.values import (
    Batch,
    BatcherSettings,
    BatchState,
    Delivered,
    Encode,
    Encoded,
    Failed,
    InitProducer,
    Placement,
    ProduceResult,
    ProducerWork,
    Refused,
    Rows,
    Send,
)

__all__ = [
    "Batch",
    "BatchState",
    "Batcher",
    "BatcherSettings",
    "Delivered",
    "Encode",
    "Encoded",
    "Failed",
    "InitProducer",
    "Placement",
    "ProduceResult",
    "ProducerWork",
    "Refused",
    "Rows",
    "Send",
]
