"""SGLang as an engine: the stock package as a child, our plugin in its scheduler.

The only folder that knows SGLang.
"""
