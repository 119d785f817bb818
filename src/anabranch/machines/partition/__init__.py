"""What becomes of a produced batch in one partition."""
