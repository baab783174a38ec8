"""Trains a drafter from a file of conversations: `paceline drafter train`.

The target's forward gives the hidden states. Any DraftNet can be trained; the learner is the
service's own.
"""
