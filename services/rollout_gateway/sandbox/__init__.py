"""Code of a model, run in a process that can do no harm. Owns no scores and no tools."""

from paceline.services.rollout_gateway.sandbox.launcher.request import SandboxResult
from paceline.services.rollout_gateway.sandbox.runs import Sandbox

__all__ = ["Sandbox", "SandboxResult"]
