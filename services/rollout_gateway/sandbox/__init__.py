"""Runs a model's code in a process that cannot do harm."""

from paceline.services.rollout_gateway.sandbox.launcher.request import SandboxResult
from paceline.services.rollout_gateway.sandbox.runs import Sandbox

__all__ = ["Sandbox", "SandboxResult"]
