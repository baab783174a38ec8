"""Trains a drafter from a file of conversations: `paceline drafter train`.

The target's forward gives the hidden states; what learns is any DraftNet, stepped by the learner
that the service uses.
"""
