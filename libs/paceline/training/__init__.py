"""Sharded training state: optimiser, checkpoints, Hugging Face directories. Imports torch."""
