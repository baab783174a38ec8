"""What a decode round with drafts costs, relative to one without. Owns the figures' choice, no
measurement.

The engine measures its arms; the coordinator hands them over as seconds per row and round of an arm
by those of plain decoding. Kinds that it has not measured are judged by configured costs: a round
with k drafts costs 1 + k (verify_cost + draft_cost) plain rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from drafter_trainer.config import GateConfig
from paceline.arm_names import read_arm


class RoundCosts:
    """Costs of chains by kind and number of drafts."""

    def __init__(self, config: GateConfig) -> None:
        self._config = config
        self._measured: dict[str, dict[int, float]] = {}

    def take(self, round_costs: Mapping[str, float]) -> None:
        """What the engine has measured, by arm ("eagle:3_1_4"); trees are no chains and left
        out.
        """
        for arm, cost in round_costs.items():
            found = read_arm(arm)
            if found is None or found.topk != 1 or cost <= 0:
                continue
            if 1 <= found.steps <= self._config.draft_steps:
                self._measured.setdefault(found.speculator, {})[found.steps] = cost

    def table(self, kinds: Collection[str]) -> tuple[dict[str, dict[int, float]], bool]:
        """Costs of every kind by number of drafts, and whether they are measured.

        Measured only where all kinds are: two kinds are compared on one footing.
        """
        if kinds and all(kind in self._measured for kind in kinds):
            return {kind: dict(self._measured[kind]) for kind in kinds}, True
        return {kind: self._configured(kind) for kind in kinds}, False

    def _configured(self, kind: str) -> dict[int, float]:
        each = self._config.verify_cost + self._config.draft_cost.get(
            kind, self._config.other_draft_cost
        )
        return {drafts: 1.0 + drafts * each for drafts in range(1, self._config.draft_steps + 1)}
