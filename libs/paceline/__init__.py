"""Paceline: reinforcement-learning post-training with speculative rollouts."""
