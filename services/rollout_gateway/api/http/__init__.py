"""HTTP over the gateway: OpenAI, Anthropic, sessions, health, metrics.

Owns routes and shapes, nothing that is done.
"""
