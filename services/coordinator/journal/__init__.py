"""Events and records in Redis, for the replay of a run and for its readers."""
