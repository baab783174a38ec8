"""The front door under load."""
