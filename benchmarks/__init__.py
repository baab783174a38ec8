"""Benches of Paceline; `paceline bench NAME` runs one from a checkout."""
