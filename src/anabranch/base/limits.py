"""The bound of everything that a peer, a file or a user can make grow. Sizes are bytes, `_max` is inclusive."""

from __future__ import annotations

REQUEST_SIZE_MAX = 100 * 1024 * 1024
"""Default of `socket.request.max.bytes`: the largest request frame."""
RESPONSE_SIZE_MAX = 1 << 30
"""The largest response frame that our client reads."""
QUEUED_REQUEST_SIZE_MAX = 256 * 1024 * 1024
"""Default of `queued.max.request.bytes`: requests held by the whole broker."""
QUEUED_RESPONSE_SIZE_MAX = 256 * 1024 * 1024
"""Default of `queued.max.response.bytes`: answers held by the whole broker that clients have not read."""
QUEUED_DECODED_SIZE_MAX = 256 * 1024 * 1024
"""Default of `queued.max.decoded.bytes`: large requests that the whole broker has decoded and handles."""
QUEUED_FETCH_SIZE_MAX = 256 * 1024 * 1024
"""Default of `queued.max.fetch.bytes`: partitions that fetches of the whole broker read and watch."""
CONNECTIONS_MAX = 10_000
"""Default of `max.connections`."""
OPEN_FILES_MAX = 10_000
"""Default of `max.open.files`: files of logs that the whole broker holds open."""
IN_FLIGHT_PER_CONNECTION_MAX = 16
"""Requests of one connection that may wait for their answer before the broker stops reading it."""

DISK_FREE_SIZE_MIN = 16 << 20
"""Default of `log.dirs.free.bytes.min`: bytes of the disk that records of clients do not take."""
RECOVERY_THREADS = 4
"""Threads that open logs when a broker starts."""

MESSAGE_SIZE_MAX = 1_048_588
"""Default of `max.message.bytes`: the largest record batch, header included."""
DECOMPRESSION_RATIO_MAX = 128
"""A batch may expand to at most `max.message.bytes` times this, or it is refused as a decompression bomb."""
EXPANDED_SIZE_MAX = 64 * 1024 * 1024
"""A batch may expand to at most this, whatever `max.message.bytes` is, unless it could be sent uncompressed."""
RECORDS_PER_BATCH_MAX = 1_000_000
"""Records of a produced batch: librdkafka's upper bound of `batch.num.messages`."""

ARRAY_LENGTH_MAX = 1_000_000
"""Array elements of one message, all its arrays together, beside the rule that they must fit in the bytes left."""
STRING_SIZE_MAX = 32_767
"""UTF-8 bytes of a string in a request or response, of flexible versions too, as in Apache Kafka: what a peer sends can
be written wherever a length has 16 bits."""
PATTERN_LENGTH_MAX = 1_000
"""Characters of a pattern that a client has the broker match."""
NESTING_DEPTH_MAX = 16
TAGGED_FIELDS_MAX = 1_000

SEGMENT_SIZE_MIN = 1 << 20
"""Default of `log.segment.min.bytes`, the least `segment.bytes`, as in Apache Kafka since 4.0."""
SEGMENT_AGE_MIN_MS = 1_000
"""Default of `log.roll.min.ms`, the least `segment.ms`."""
SMALL_SEGMENT_AGE_MS = 10_000
"""Default of `log.roll.small.ms`."""
TOPIC_NAME_LENGTH_MAX = 249
PARTITIONS_PER_TOPIC_MAX = 100_000
PARTITIONS_PER_BROKER_MAX = 200_000
"""Default of `max.partitions.per.broker`."""
LAYOUTS_PER_TOPIC_MAX = 32_767
"""Layouts of which a topic's logs hold records; those without records are folded away (ADR 0032)."""
SEQUENCE_OFFSET_BITS = 48
"""Bits of a record's offset in its `sequence` (spark.md, section 1), below those of its layout's number."""
LATE_LAYOUT = 1 << 14
"""From this layout on a `sequence` has 62 bits below a leading one: 18 of the layouts since, LATE_OFFSET_BITS of the
offset. So it has room for LAYOUT_NUMBER_MAX resizes, and still grows with every record of a key (ADR 0032)."""
LATE_OFFSET_BITS = 44
LAYOUT_NUMBER_MAX = LATE_LAYOUT + (1 << 62 - LATE_OFFSET_BITS) - 1

CONFIGS_PER_RESOURCE_MAX = 500
"""Configs that a request gives one resource: many times as many as there are."""
CONFIGS_SIZE_MAX = 64 * 1024
"""Characters of the names and values of these."""
CONFIGURED_GROUPS_MAX = 10_000
"""Groups with configs of their own; the controller keeps them for ever."""
GROUP_ID_LENGTH_MAX = 1_000
"""Characters of the id of such a group."""

FETCH_SESSIONS_MAX = 1_000
FETCH_SESSIONS_SIZE_MAX = 128 * 1024 * 1024
"""Default of `max.incremental.fetch.session.cache.bytes`: 750,000 partitions."""
PRODUCER_BATCHES_REMEMBERED = 5
"""Batches per producer whose repetition is recognized: the in-flight limit of idempotent Kafka producers."""
PRODUCERS_PER_PARTITION_MAX = 100_000
PRODUCER_IDLE_MIN_MS = 300_000
"""How long a producer is remembered at least, whoever else writes: longer than any producer repeats a batch."""
PRODUCERS_SIZE_MAX = 512 * 1024 * 1024
"""Default of `producer.state.max.bytes`: what the logs of a broker remember of producers."""
PRODUCER_ID_BITS = 40
"""Producer ids handed out stay below 2**40; the bits above name the retiring partition of a redirected batch."""

OFFSETS_SIZE_MAX = 512 * 1024 * 1024
"""Default of `offsets.max.bytes`: more than a million committed offsets."""
TRANSACTIONS_SIZE_MAX = 256 * 1024 * 1024
"""Default of `transaction.metadata.max.bytes`: transactional ids, and the partitions that their transactions hold."""
PARTITIONS_PER_TRANSACTION_MAX = 10_000
"""They are all in one record."""
ABORTED_TRANSACTIONS_MAX = 1_000_000
"""Lines of a partition's aborted-transaction index; beyond it the partition takes no more transactions."""

CLIENT_ASSIGNORS_MAX = 100
"""Assignors that a member of a group may offer."""
MEMBER_ID_PREFIX_MAX = 255
"""Characters of a client id or instance id that a member id begins with."""
PENDING_MEMBERS_PER_GROUP_MAX = 10_000
"""Members of a classic group that were given an id and did not join with it yet."""
RANGES_PER_COMMIT_MAX = 60_000
"""Ranges of one OffsetCommit or TxnOffsetCommit, of offsets and of keys together: the proposal's 1 MB of 16 bytes."""
FRONTIER_STEPS_MAX = 1_000
"""Intervals of keys with offsets of their own that a group may have in one partition: far more than sharers."""
POSITION_WAIT_MAX_MS = 30_000
"""The longest time for which a member's question for positions is parked, in ms."""
FILTERING_SIZE_MAX = 100 * 1024 * 1024
"""Memory for filtering records for fetches, by default."""
SLICES_SIZE_MAX = 256 * 1024 * 1024
"""Default of `cooperative.fetch.max.bytes`: 650,000 slices."""
KEY_RANGE_CACHE_SIZE_MAX = 200 * 1024 * 1024
"""Memory for filtered records that are kept for other readers, by default."""
