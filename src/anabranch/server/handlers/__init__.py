"""One module per API: translate, submit, translate back; decide nothing."""
