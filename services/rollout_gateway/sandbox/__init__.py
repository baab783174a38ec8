"""Code of a model, run in a process that can do no harm. Owns no scores and no tools."""

from rollout_gateway.sandbox.runs import Sandbox, SandboxResult

__all__ = ["Sandbox", "SandboxResult"]
