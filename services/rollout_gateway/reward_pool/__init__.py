"""Scores and runs code on slots of a Ray cluster, in a pool of their own, instead of beside the
gateway.
"""
