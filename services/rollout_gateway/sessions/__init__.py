"""Sessions: the exact tokens of what a model saw and said, and what they earned.

Owns neither engine nor transport.
"""
