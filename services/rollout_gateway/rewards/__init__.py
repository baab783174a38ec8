"""Reward rules: one file each, named in the table of rules.py."""
