"""An engine without a model that answers by a script."""
