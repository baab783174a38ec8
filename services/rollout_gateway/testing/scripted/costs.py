"""What the rounds of a script cost: seconds by arm and batch size."""

from __future__ import annotations

from paceline.arm_names import OFF
from paceline.services.rollout_gateway.testing.scripted.script import ScriptedSpec


def round_cost(spec: ScriptedSpec, arm: str, batch: int) -> float:
    """Seconds of a round with so many requests."""
    table = spec.costs_s.get(arm, {})
    sizes = [size for size in table if size <= batch]
    return table[max(sizes)] if sizes else spec.default_cost_s


def drafts_of(arm: str) -> int:
    """Drafts per row of `<speculator>:<steps>_<topk>_<draft tokens>`, whose first node is the last
    known token.
    """
    return 0 if arm == OFF else int(arm.rpartition("_")[2]) - 1
