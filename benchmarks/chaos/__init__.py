"""Runs a whole system under seeded faults and judges its remains by independent code."""
