"""Refuses requests that the engine would refuse, before they are sent to a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from paceline.errors import InvalidInput, MissingCapability
from paceline.services.rollout_gateway.engines.nouns import SETTINGS, Capability
from paceline.services.rollout_gateway.engines.requests.structures import (
    FIELDS,
    beyond_json,
    structure_of,
)
from paceline.services.rollout_gateway.engines.sampling import (
    Sampling,
    check_prompt,
    check_sampling,
)
from paceline.v1 import engine_pb2 as pb

CHECKED_FIELDS = (
    *(field.name for field in fields(Sampling)),
    "prompt",
    *FIELDS.values(),
    "messages",
    "tools",
    "tool_choice",
    "truncate_prompt_tokens",
)
"""Fields of a request that an error message may begin with."""


def check_request(
    ready: pb.WorkerReady, prompt: Sequence[int], sampling: Sampling, forced_arm: str = ""
) -> None:
    """Raises InvalidInput with the field that the engine would refuse, or MissingCapability."""
    check_prompt(tuple(prompt), ready.vocab_size, ready.max_sequence_tokens)
    check_sampling(sampling, ready.vocab_size)
    _check_capabilities(ready, sampling)
    room = ready.max_sequence_tokens - len(prompt)
    if sampling.min_tokens > room:
        raise InvalidInput(
            "min_tokens does not fit behind the prompt", seen=sampling.min_tokens, allowed=room
        )
    structure_of(sampling)
    check_arm(ready, forced_arm)


def check_arm(ready: pb.WorkerReady, arm: str) -> None:
    """Raises InvalidInput for an arm that the engine does not serve; "" means no forced arm."""
    if arm and arm not in ready.arms:
        raise InvalidInput("unknown arm", seen=arm, allowed=", ".join(ready.arms))


def _check_capabilities(ready: pb.WorkerReady, sampling: Sampling) -> None:
    asked = {
        Capability.PENALTIES: _adjusting(sampling),
        Capability.PROMPT_LOGPROBS: "prompt_logprobs" if sampling.scored else "",
        Capability.JSON_SCHEMA: "response_format" if sampling.json_schema else "",
        Capability.GRAMMARS: "structured_outputs or a strict tool" if beyond_json(sampling) else "",
    }
    for capability, seen in asked.items():
        if seen and capability not in ready.capabilities:
            raise MissingCapability(
                f"the engine lacks the capability {capability}",
                seen=seen,
                allowed=SETTINGS[capability],
            )


def _adjusting(sampling: Sampling) -> str:
    """The request's setting that changes logits before the draw; "" without any."""
    if sampling.confined:
        return "min_tokens" if sampling.min_tokens else "allowed_token_ids"
    return "a penalty or logit_bias" if sampling.adjusted else ""
