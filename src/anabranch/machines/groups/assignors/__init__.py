"""Server-side assignors: which member should own which partition (KIP-848, Server Side Assignor).

A coordinator keeps one `Planner` per group (`assignors.planner`) and asks it for the targets that change. This package
itself is plain Python, so that a name can be checked without NumPy; `planner`, `spec` and the assignors import it and
are imported when a group is first assigned.
"""

from anabranch.machines.groups.assignors.model import Assignment, Subscriber, Topic
from anabranch.machines.groups.assignors.registry import DEFAULT_ASSIGNOR, Assignors, UnknownAssignorError

__all__ = [
    "DEFAULT_ASSIGNOR",
    "Assignment",
    "Assignors",
    "Subscriber",
    "Topic",
    "UnknownAssignorError",
]
