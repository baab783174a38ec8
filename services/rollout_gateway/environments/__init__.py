"""Environments: one file each, named in table.py."""
