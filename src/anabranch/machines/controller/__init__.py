"""The controller: topics, resizes in resumable steps, and the reaper (ordering.md, section 4).

State is a fold over changes of the metadata tree (`state.apply`); everything else decides. A decision gives records to
persist (together, or in order: any prefix is a state that the next controller finishes), a reply, and effects to
perform after them, in order. The shell answers an effect by submitting the event that belongs to it; a late,
repeated or missing answer does no harm, because an effect carries a whole target, never a difference.

    commands  topics.decide_{create,delete}_topic  resize.decide_resize_topic  configs.decide_{alter,replace}_configs
    events    terms.decide_{elected,register_broker,broker_left}  resize.decide_{leader_and_isr_answered,retry}
              topics.decide_stop_replica_answered  reaper.decide_reap
    leaders   leadership.{take_role,refuse_read}    readers  views
"""
