"""The classic group protocol: members join, the leader assigns, and every join or leave restarts the cycle for all.

`decide_*` look at a group and carry its rebalance on, `apply` folds the record of a generation into it; see `group` for
the states, `rebalance` for the course of one.
"""

from anabranch.machines.groups.classic.group import (
    NEXT,
    ClassicEvent,
    ClassicGroup,
    ClassicGroupView,
    ClassicMember,
    ClassicState,
    apply,
    generation_record,
    group_of,
    owners,
    restore,
    subscribed_topics,
    tombstone,
    view,
)
from anabranch.machines.groups.classic.join import Caller, decide_join, member_error
from anabranch.machines.groups.classic.sessions import (
    commit_error,
    decide_delete,
    decide_dissolve,
    decide_heartbeat,
    decide_kick,
    decide_leave,
    decide_loaded,
    decide_timer,
    session_timer,
)
from anabranch.machines.groups.classic.settings import ClassicSettings
from anabranch.machines.groups.classic.sync import decide_sync

__all__ = [
    "NEXT",
    "Caller",
    "ClassicEvent",
    "ClassicGroup",
    "ClassicGroupView",
    "ClassicMember",
    "ClassicSettings",
    "ClassicState",
    "apply",
    "commit_error",
    "decide_delete",
    "decide_dissolve",
    "decide_heartbeat",
    "decide_join",
    "decide_kick",
    "decide_leave",
    "decide_loaded",
    "decide_sync",
    "decide_timer",
    "generation_record",
    "group_of",
    "member_error",
    "owners",
    "restore",
    "session_timer",
    "subscribed_topics",
    "tombstone",
    "view",
]
