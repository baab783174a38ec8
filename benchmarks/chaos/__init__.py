"""Runs a whole system under seeded faults and judges what it has left by code of its own."""
