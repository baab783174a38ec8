"""Paceline service: coordinator."""
