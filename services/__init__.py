"""The services: a folder of the tree, `paceline.services` where it is imported."""
