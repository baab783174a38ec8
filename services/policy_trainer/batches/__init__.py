"""Trajectories as training batches."""
