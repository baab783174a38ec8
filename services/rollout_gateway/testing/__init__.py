"""For tests and examples: an engine that follows a script, and CPU substitutes for GPU kernels."""
