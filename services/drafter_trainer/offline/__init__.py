"""Trains a drafter from a file of conversations: `paceline train-drafter`.

The target's forward gives the hidden states; what learns is any DraftNet, stepped by the learner
that the service uses.
"""
