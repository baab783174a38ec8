"""A request from its plan to its answer."""
