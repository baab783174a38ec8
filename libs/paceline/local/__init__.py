"""Processes on one machine: the service table, the supervisor, Redis, trainer ranks and how a
service starts.
"""
