"""Estimates the disk that a run's checkpoints and spooled weights take."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.local.memory_plan import (
    FLOAT,
    adapter_parameters,
    embedding_parameters,
    format_size,
    parameters,
)
from paceline.models.config import read_config

CHECKPOINTS = 4
"""Checkpoints on the disk: the two newest, the best, and one that is being written."""
SPOOLED = 5
"""Policies on the disk for restarts: two committed sets and a prepared one, and their heads."""


def check_disk(found: Mapping[str, Any]) -> list[str]:
    """A sentence on the disk that a run's checkpoints and spooled weights take, if the model can be
    read.
    """
    gateway, policy = found["gateway"], found["policy_trainer"]
    try:
        model = read_config(gateway.model_dir, experts=True)
    except PacelineError:
        return []
    weights = parameters(model)
    numbers = 3 * weights  # of a checkpoint: the weights, once, and their moments
    if policy.adapters.rank:
        low_rank = adapter_parameters(model, policy.adapters.rank, policy.adapters.targets)
        numbers = weights + 3 * low_rank
    if policy.algorithm.name == "ppo":
        numbers += 3 * (
            weights - embedding_parameters(model) + model.vocab_size * model.hidden_size
        )
    kept = FLOAT * (CHECKPOINTS * numbers + SPOOLED * weights)
    place = Path(policy.run.dir).absolute()
    free = shutil.disk_usage(next(one for one in (place, *place.parents) if one.is_dir())).free
    verdict = "disk may run short" if kept > free else "disk"
    return [f"{verdict}: at most {format_size(kept)} of {format_size(free)} free"]
