"""Between record batches and Arrow: `decode` bytes into columns, `encode` columns into batches."""
