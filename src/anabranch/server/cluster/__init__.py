"""What this broker knows of its cluster, and how it speaks to the other brokers."""
