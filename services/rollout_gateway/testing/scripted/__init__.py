"""An engine without a model that answers from a script."""
