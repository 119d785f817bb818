"""State that follows the keys: tables by key beside a consumer, kept in a changelog; see `machines.clients.table`."""
