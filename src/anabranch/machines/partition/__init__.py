"""One partition at its leader: whether a produced batch is sound, what becomes of it, what producers are known."""
