"""Which sampling can be trained.

Owns the list; the trainer recomputes log-probs by temperature alone.
"""

from __future__ import annotations

from paceline.errors import TrainabilityError
from paceline.v1 import trajectory_pb2 as tpb


def check_trainable(sampling: tpb.SamplingParams) -> None:
    """Raises TrainabilityError for sampling whose log-probs the trainer cannot recompute."""
    refused = {
        "top_p": sampling.top_p if 0 < sampling.top_p < 1 else None,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "repetition_penalty": sampling.repetition_penalty
        if sampling.repetition_penalty not in (0, 1)
        else None,
        "entries of logit_bias": len(sampling.logit_bias) or None,
        "characters of json_schema": len(sampling.json_schema) or None,
        "temperature": None if sampling.temperature > 0 else sampling.temperature,
    }
    found = {name: value for name, value in refused.items() if value is not None}
    if found:
        raise TrainabilityError(
            "these samples cannot be trained; open the session with trainable=false or leave the "
            "setting out",
            seen=", ".join(f"{name}={value:g}" for name, value in found.items()),
            allowed="temperature > 0, top_p=1, top_k=0, min_p=0, no penalty, no logit_bias, no "
            "json_schema",
        )
