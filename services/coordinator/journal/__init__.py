"""Events and records in Redis: what replays a run and what a reader of it sees."""
