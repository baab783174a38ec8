"""What a request may ask of the engine that serves, before it is sent there.

Owns the ranges and the errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.errors import InvalidInput, MissingCapability
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.engines.nouns import MAX_BIASED_TOKENS, SETTINGS, Capability
from rollout_gateway.engines.requests.json_schema import check_json_schema
from rollout_gateway.engines.worker import wire

MAX_TOP_LOGPROBS = 20
CHECKED_FIELDS = (
    "prompt",
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "max_tokens",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "logit_bias",
    "response_format",
    "messages",
    "tool_choice",
)
"""Fields of a request that a refusal may begin with."""


def check_request(
    ready: pb.WorkerReady, prompt: Sequence[int], sampling: tpb.SamplingParams, forced_arm: str = ""
) -> None:
    """Raises InvalidInput naming the field that the engine would refuse, or MissingCapability."""
    longest = ready.max_sequence_tokens - 1
    if not 1 <= len(prompt) <= longest:
        raise InvalidInput(
            "prompt does not fit", seen=f"{len(prompt)} tokens", allowed=f"1 to {longest} tokens"
        )
    if max(prompt) >= ready.vocab_size or min(prompt) < 0:
        allowed = f"0 to {ready.vocab_size - 1}"
        raise InvalidInput(
            "prompt holds a token id out of range", seen=max(prompt), allowed=allowed
        )
    _check_ranges(sampling)
    _check_logit_bias(sampling, ready.vocab_size)
    _check_capabilities(ready, sampling)
    if sampling.json_schema:
        check_json_schema(sampling.json_schema, ignore_eos=sampling.ignore_eos)
    check_arm(ready, forced_arm)


def check_arm(ready: pb.WorkerReady, arm: str) -> None:
    """Raises InvalidInput for an arm that the engine does not serve; "" is none."""
    if arm and arm not in ready.arms:
        raise InvalidInput("unknown arm", seen=arm, allowed=", ".join(ready.arms))


def _check_ranges(sampling: tpb.SamplingParams) -> None:
    ranges = {
        "temperature": (sampling.temperature, 0.0, 10.0),
        "top_p": (sampling.top_p, 0.0, 1.0),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "top_k": (sampling.top_k, 0, math.inf),
        "max_tokens": (sampling.max_tokens, 1, math.inf),
        "top_logprobs": (sampling.top_logprobs, 0, MAX_TOP_LOGPROBS),
        "presence_penalty": (sampling.presence_penalty, -2.0, 2.0),
        "frequency_penalty": (sampling.frequency_penalty, -2.0, 2.0),
        "repetition_penalty": (sampling.repetition_penalty or 1.0, 0.1, 10.0),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:  # false for NaN too
            raise InvalidInput(
                f"{name} is out of range", seen=value, allowed=f"{low:g} to {high:g}"
            )
    if any(not stop for stop in sampling.stop):
        raise InvalidInput("stop holds an empty string", seen="''", allowed="non-empty strings")


def _check_logit_bias(sampling: tpb.SamplingParams, vocab_size: int) -> None:
    bias = sampling.logit_bias
    if len(bias) > MAX_BIASED_TOKENS:
        raise InvalidInput(
            "logit_bias has too many entries", seen=len(bias), allowed=MAX_BIASED_TOKENS
        )
    for token, value in sorted(bias.items()):
        if token >= vocab_size:
            raise InvalidInput(
                "logit_bias names a token out of range",
                seen=token,
                allowed=f"0 to {vocab_size - 1}",
            )
        if not -100 <= value <= 100:
            raise InvalidInput(
                f"logit_bias of token {token} is out of range", seen=value, allowed="-100 to 100"
            )


def _check_capabilities(ready: pb.WorkerReady, sampling: tpb.SamplingParams) -> None:
    if sampling.top_logprobs and Capability.TOP_LOGPROBS not in ready.capabilities:
        raise MissingCapability(
            f"the engine lacks the capability {Capability.TOP_LOGPROBS}",
            seen=sampling.top_logprobs,
            allowed="top_logprobs=0",
        )
    if wire.sampling_from(sampling).adjusted and Capability.PENALTIES not in ready.capabilities:
        raise MissingCapability(
            f"the engine lacks the capability {Capability.PENALTIES}",
            seen="a penalty or logit_bias",
            allowed=SETTINGS[Capability.PENALTIES],
        )
    if sampling.json_schema and Capability.JSON_SCHEMA not in ready.capabilities:
        raise MissingCapability(
            f"the engine lacks the capability {Capability.JSON_SCHEMA}",
            seen="response_format",
            allowed=SETTINGS[Capability.JSON_SCHEMA],
        )
