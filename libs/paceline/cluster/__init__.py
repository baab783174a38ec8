"""Runs the services of a run as Ray actors, one actor each, on their slots."""
