"""The transaction coordinator: one pure machine per partition of `__transaction_state` (KIP-98, KIP-360, KIP-890)."""
