"""Carries out the machine's commands: gRPC calls to the peers, and what they answer as events."""
