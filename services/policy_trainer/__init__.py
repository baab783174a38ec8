"""Paceline service: policy trainer."""
