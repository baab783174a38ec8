"""SGLang as an engine: the stock package runs as a child process, with a plugin in its scheduler.

Only this folder depends on SGLang.
"""
