"""Where bytes stay: the partition log and the metadata store, each behind one small interface (storage.md)."""
