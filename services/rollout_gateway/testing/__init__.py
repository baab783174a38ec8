"""For tests and examples: an engine without a model that answers from a script."""

from __future__ import annotations
