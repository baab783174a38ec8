"""Sessions: the exact tokens of a model's prompts and answers, and their rewards.

The package contains neither engine nor transport.
"""
