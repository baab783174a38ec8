"""The policy and its optimiser, sharded over ranks."""
