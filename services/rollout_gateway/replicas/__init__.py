"""Runs several processes as one gateway: a head with the addresses, and its replicas."""
