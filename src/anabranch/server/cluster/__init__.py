"""The broker's view of its cluster, and its requests to the other brokers."""
