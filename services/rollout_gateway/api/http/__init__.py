"""The gateway over HTTP: OpenAI, Anthropic, sessions, health, metrics.

The modules own routes and JSON shapes; the gateway does the work.
"""
