"""For tests and examples: an engine without a model that answers from a script."""
