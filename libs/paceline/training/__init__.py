"""Sharded training state: optimiser, checkpoints, Hugging Face directories. Imports torch."""

STORE_VARIABLE = "PACELINE_RANK_STORE"
"""Variable with the file over which ranks find each other: new for each group, in a private
directory.
"""

DEVICE_VARIABLE = "PACELINE_RANK_DEVICE"
"""Names the kind of device that a rank computes on; empty: its settings say it."""
