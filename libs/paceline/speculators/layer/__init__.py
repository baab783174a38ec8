"""Drafters with decoder layers and a KV cache: the shared parts of EAGLE, EAGLE-3 and DFlash."""
