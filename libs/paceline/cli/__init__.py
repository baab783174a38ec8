"""Implements the `paceline` command, which starts services and benchmarks as separate processes."""
