"""Names the algorithms, as `algorithm.name` does.

A new one is a file here and a line in the table.
"""

from __future__ import annotations

from collections.abc import Callable

from policy_trainer.algorithms.base import Algorithm, TokenBatch, TokenLoss
from policy_trainer.algorithms.grpo import Grpo
from policy_trainer.config import AlgorithmConfig

ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"grpo": Grpo}

__all__ = ["ALGORITHMS", "Algorithm", "TokenBatch", "TokenLoss"]
