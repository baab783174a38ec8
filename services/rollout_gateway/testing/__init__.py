"""For tests and examples: an engine that follows a script, CPU stand-ins for GPU kernels."""
