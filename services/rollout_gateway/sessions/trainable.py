"""Refuses sampling that cannot be trained.

The trainer recomputes log-probs by temperature alone.
"""

from __future__ import annotations

from paceline.errors import TrainabilityError
from rollout_gateway.engines.sampling import Sampling, untrainable

SHOWN_CHARACTERS = 40


def check_trainable(sampling: Sampling) -> None:
    """Raises TrainabilityError for sampling whose log-probs the trainer cannot recompute."""
    if found := untrainable(sampling):
        raise TrainabilityError(
            "these samples cannot be trained; open the session with trainable=false or leave the "
            "setting out",
            seen=", ".join(f"{name}={_short(value)}" for name, value in found.items()),
            allowed="temperature > 0, top_p=1, top_k=0, min_p=0, no penalty, no logit_bias, no "
            "json_schema",
        )


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
