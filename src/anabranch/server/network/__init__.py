"""Connections of clients: listening, reading requests, writing answers."""
