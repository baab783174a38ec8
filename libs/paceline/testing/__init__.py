"""Stand-ins for tests: a stream in memory."""
