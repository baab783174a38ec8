"""SGLang as an engine: the stock package as a child, our plugin in its scheduler.

The only folder that knows SGLang.
"""

VERSIONS = ("0.5.21",)
"""SGLang releases whose hook points and alignment were checked by tests/sglang."""
