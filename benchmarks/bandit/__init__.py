"""Bandits over recorded and simulated rounds."""
