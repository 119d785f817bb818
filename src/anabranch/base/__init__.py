"""Error codes and exceptions, ids, and the limit on everything."""
