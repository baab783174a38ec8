"""Carries out the machine's commands as gRPC calls to the peers, and emits the answers
as events.
"""
