"""Decides which drafter serves."""
