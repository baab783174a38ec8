"""Hidden rows from the workers' rings to the features stream."""
