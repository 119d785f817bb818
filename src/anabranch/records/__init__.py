"""Record batches v2: layout, checksums, compression, hashes, and the kernels between batches and Arrow columns."""
