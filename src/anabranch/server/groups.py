"""The group coordinators of this broker: shards over `__consumer_offsets`, told whenever topics change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from anabranch.machines.controller.group_configs import HEARTBEAT_INTERVAL, SESSION_TIMEOUT, GroupConfig
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from anabranch.server.controller import Controller
from anabranch.server.coordinators import Coordinators
from anabranch.server.replicas import Replicas
from anabranch.server.settings import Settings
from anabranch.server.shard import RecordCodec

if TYPE_CHECKING:  # Read when the first log is, so that a broker that coordinates nothing starts without them.
    from anabranch.machines.groups.coordinator import Coordinator
    from anabranch.machines.groups.records import Record
    from anabranch.machines.groups.settings import GroupSettings

TOPIC = "__consumer_offsets"
