"""EAGLE-3 (Li et al. 2025)."""
