"""Starts, commands, watches and stops the rank processes of a trainer."""
