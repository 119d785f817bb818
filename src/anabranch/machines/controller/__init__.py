"""The controller: topics, resizes in resumable steps, and the reaper (ordering.md, section 4).

State is a fold over changes of the metadata tree (`state.apply`); everything else decides. A decision gives an
`Outcome`: records to persist (all together, or in order: any prefix is a state that the next controller finishes), a
reply, and effects to perform after them, in order. The shell answers an effect by submitting the event that belongs to
it; an answer that comes late, twice or never does no harm, because an effect says a whole target, never a difference.

    commands  create_topic delete_topic resize_topic alter_configs replace_configs elected register_broker
    effects   PublishMetadata SendLeaderAndIsr SendStopReplica ApplyConfigs InspectRetiring
    events    leader_and_isr_answered stop_replica_answered reap retry
"""
