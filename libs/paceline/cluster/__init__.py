"""Runs the services of a run as actors of a Ray cluster, one each, on the slots they compute on."""
