"""HTTP over the gateway: OpenAI, Anthropic, sessions, health, metrics. Owns routes and shapes; the gateway does the work."""
