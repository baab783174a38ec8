"""Reward rules: one file each, listed in the table of rules.py."""
