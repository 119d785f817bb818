"""Everything that decides, as state machines without I/O: inputs, `now_ms` and ids come in, effects go out."""
