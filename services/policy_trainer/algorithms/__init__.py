"""Lists the algorithms by the name used in `algorithm.name`.

The table holds import paths, because the service's parent process reads the settings without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.plugins import find_variant, import_object
from paceline.services.policy_trainer.algorithm_settings import AnyAlgorithm

if TYPE_CHECKING:
    from paceline.services.policy_trainer.algorithms.base import Algorithm

_HERE = "paceline.services.policy_trainer.algorithms"
ALGORITHMS = {
    "grpo": f"{_HERE}.grpo:Grpo",
    "dr_grpo": f"{_HERE}.grpo:Grpo",
    "rloo": f"{_HERE}.grpo:Rloo",
    "reinforce_plus_plus": f"{_HERE}.grpo:ReinforcePlusPlus",
    "reinforce_plus_plus_baseline": f"{_HERE}.grpo:ReinforcePlusPlus",
    "ppo": f"{_HERE}.grpo:Ppo",
    "dapo": f"{_HERE}.grpo:Dapo",
    "gspo": f"{_HERE}.grpo:Gspo",
    "cispo": f"{_HERE}.grpo:Cispo",
    "decoupled": f"{_HERE}.grpo:Grpo",
}


def check_algorithm(name: str) -> None:
    """Raises ConfigError for a name that is neither in the table nor an import path."""
    if ":" not in name:
        find_variant(name, ALGORITHMS, "algorithm")


def build_algorithm(config: AnyAlgorithm) -> Algorithm:
    """Builds an algorithm, named or given by import path, from its settings. Raises ConfigError."""
    found = find_variant(config.name, ALGORITHMS, "algorithm")
    algorithm: Algorithm = (import_object(found) if isinstance(found, str) else found)(config)
    return algorithm
