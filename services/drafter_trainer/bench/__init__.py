"""Measurements of the drafter trainer."""
