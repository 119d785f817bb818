"""The state machines of the clients: fetching, group membership, sending."""
