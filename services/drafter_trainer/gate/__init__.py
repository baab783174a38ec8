"""Decides which drafter is served."""
