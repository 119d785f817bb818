"""Wire types, the declaration of a message, and compiled readers and writers per version (wire.md, section 2)."""
