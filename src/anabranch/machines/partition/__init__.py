"""One partition at its leader: the checks of produced batches, the decisions about them, and the known producers."""
