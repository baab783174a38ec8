"""Child processes that score."""
