"""Benches of what no single service owns. Starts its own processes; imports no service."""
