"""Engine workers as the gateway sees them: processes, placement, weights, metrics."""
