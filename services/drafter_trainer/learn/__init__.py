"""The drafter and its optimiser, sharded over ranks."""
