"""What a request may ask of any engine: prompt and sampling bounds. Owns no queue."""

from __future__ import annotations

from paceline.errors import InvalidInput
from rollout_gateway.engines.base import Request, Sampling


def check_request(request: Request, vocab_size: int, max_sequence_tokens: int) -> None:
    """Raises InvalidInput naming the value that cannot work."""
    prompt = request.prompt
    if not prompt or len(prompt) >= max_sequence_tokens:
        allowed = f"1 to {max_sequence_tokens - 1} tokens"
        raise InvalidInput("the prompt does not fit", seen=len(prompt), allowed=allowed)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        seen = max(prompt) if min(prompt) >= 0 else min(prompt)
        raise InvalidInput("a prompt token is out of range", seen=seen, allowed=f"0 to {vocab_size - 1}")
    _check_sampling(request.sampling)


def _check_sampling(sampling: Sampling) -> None:
    bounds = {
        "max_tokens": (sampling.max_tokens >= 1, sampling.max_tokens, ">= 1"),
        "temperature": (0 <= sampling.temperature < float("inf"), sampling.temperature, ">= 0"),
        "top_p": (0 < sampling.top_p <= 1, sampling.top_p, "0 < top_p <= 1"),
        "top_k": (sampling.top_k >= 0, sampling.top_k, ">= 0 (0: all)"),
        "min_p": (0 <= sampling.min_p <= 1, sampling.min_p, "0 to 1"),
        "stop": (all(sampling.stop), sampling.stop, "strings that are not empty"),
    }
    for name, (fine, seen, allowed) in bounds.items():
        if not fine:
            raise InvalidInput(f"{name} is out of range", seen=seen, allowed=allowed)
