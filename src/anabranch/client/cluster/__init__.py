"""Connections to brokers, metadata, and finding coordinators."""
