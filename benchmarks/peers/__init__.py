"""Measures the embedded engine beside other engines of a CPU, on one model and the same prompts."""
