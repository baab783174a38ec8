"""Paceline service: drafter trainer."""
