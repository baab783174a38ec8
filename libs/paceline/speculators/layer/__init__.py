"""Drafters of one decoder layer, shared by EAGLE and EAGLE-3."""
