"""Costs of a script's rounds: seconds by arm and batch size."""

from __future__ import annotations

from paceline.arm_names import OFF
from paceline.services.rollout_gateway.testing.scripted.script import ScriptedSpec


def round_cost(spec: ScriptedSpec, arm: str, batch: int) -> float:
    """Seconds of a round with `batch` requests."""
    table = spec.costs_s.get(arm, {})
    sizes = [size for size in table if size <= batch]
    return table[max(sizes)] if sizes else spec.default_cost_s


def drafts_of(arm: str) -> int:
    """Draft tokens per row of the arm `<speculator>:<steps>_<topk>_<draft tokens>`. The first node,
    the last accepted token, does not count.
    """
    return 0 if arm == OFF else int(arm.rpartition("_")[2]) - 1
