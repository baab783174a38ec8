"""The embedded engine beside the plain loop and transformers."""
