"""Benches of the gateway's engines, in worker processes as the gateway runs them."""
