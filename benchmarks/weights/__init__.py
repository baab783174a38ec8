"""Full pushes and deltas of weights."""
