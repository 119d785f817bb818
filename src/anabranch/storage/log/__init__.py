"""The partition log: segments, indexes, leader epochs, recovery, retention."""
