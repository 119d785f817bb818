"""What every layer shares: error codes and exceptions, ids, and the limit on everything."""
