"""Paceline service: rollout gateway."""
