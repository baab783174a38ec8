"""Drafters made of one decoder layer, which EAGLE and EAGLE-3 share."""
