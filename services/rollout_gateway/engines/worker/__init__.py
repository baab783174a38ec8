"""The worker process: its loop, its socket, its spec and the ring of hidden rows."""
