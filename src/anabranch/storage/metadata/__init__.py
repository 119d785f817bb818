"""The metadata store: a tree of versioned nodes with transactions and watches."""
