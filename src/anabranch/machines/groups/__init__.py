"""The group coordinator's pure machines: consumer and classic groups, their records, assignors."""
