"""Hidden rows as training batches."""
