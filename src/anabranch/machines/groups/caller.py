"""The sender of a request to the coordinator."""

from __future__ import annotations

from typing import NamedTuple


class Caller(NamedTuple):
    """The sender of a request."""

    client_id: str = ""
    client_host: str = ""
    version: int = 0
    """Of the request."""
    member_id: str = ""
    """A fresh random id, should the coordinator have to name a member."""
    connection: int = 0
    """Numbers connections in the order in which they were accepted."""
