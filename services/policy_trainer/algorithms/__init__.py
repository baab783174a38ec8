"""Lists the algorithms, by the name used in `algorithm.name`.

The table names them by import path, because the service's parent checks the name without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plugins import find_variant, import_object
from policy_trainer.config import AlgorithmConfig

if TYPE_CHECKING:
    from policy_trainer.algorithms.base import Algorithm

ALGORITHMS = {
    "grpo": "policy_trainer.algorithms.grpo:Grpo",
}


def check_algorithm(name: str) -> None:
    """Raises ConfigError for a name that is neither in the table nor an import path."""
    if ":" not in name:
        find_variant(name, ALGORITHMS, "algorithm")


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm of a name or an import path, built from its settings. Raises ConfigError."""
    found = find_variant(config.name, ALGORITHMS, "algorithm")
    algorithm: Algorithm = (import_object(found) if isinstance(found, str) else found)(config)
    return algorithm
