"""The sink: `df.write.format("anabranch")` and `df.writeStream.format("anabranch")`, exactly once by default.

    task      begins a transaction, writes its rows, and leaves it prepared   (`task`)
    driver    decides the micro-batch in one record, then commits all of them (`writer`, `decision`)

Until the decision nothing of a micro-batch can become visible; after it, all of it will, whoever dies: a replay finds
the decision, and finishes it instead of writing again. Only requests of Apache Kafka's protocol are used, so topics of
other brokers can be written in the same way.
"""
