"""Sharded training state: optimiser, checkpoints, Hugging Face directories. Imports torch."""

STORE_VARIABLE = "PACELINE_RANK_STORE"
"""Names the file over which ranks find each other: fresh for each group, in a private directory."""
