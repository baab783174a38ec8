"""Engines behind one contract; the table is filled by `engine_named` in engines/worker.py."""
