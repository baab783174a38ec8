"""Drives the coordinator's machine in virtual time: a simulated fleet answers its commands."""
