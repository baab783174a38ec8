"""What may enter an engine, and where each request ends: the same for all that run a model.

Owns no queue.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig
from rollout_gateway.engines.nouns import MAX_BIASED_TOKENS, Request, Sampling
from rollout_gateway.engines.requests.sequence import RunningSequence, StopText


class Admission:
    """Turns requests into sequences."""

    def __init__(self, config: ModelConfig, model_dir: Path, max_sequence_tokens: int) -> None:
        self.max_sequence_tokens = min(max_sequence_tokens, config.max_position_embeddings)
        self._config = config
        self._tokenizer_path = model_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    def sequence(self, request: Request) -> RunningSequence:
        """A sequence that waits. Raises InvalidInput naming the value that cannot work."""
        check_request(request, self._config.vocab_size, self.max_sequence_tokens)
        prompt, sampling = request.prompt, request.sampling
        eos = () if sampling.ignore_eos else self._config.eos_token_ids
        return RunningSequence(
            request=request,
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            token_limit=min(sampling.max_tokens, self.max_sequence_tokens - len(prompt)),
            stop_text=StopText(self._load_tokenizer(), sampling.stop) if sampling.stop else None,
            length=len(prompt),
        )

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            if not self._tokenizer_path.is_file():
                raise InvalidInput("stop strings need a tokenizer.json", seen=self._tokenizer_path)
            self._tokenizer = Tokenizer.from_file(str(self._tokenizer_path))
        return self._tokenizer


def check_request(request: Request, vocab_size: int, max_sequence_tokens: int) -> None:
    """Raises InvalidInput naming the value that cannot work."""
    prompt = request.prompt
    if not prompt or len(prompt) >= max_sequence_tokens:
        allowed = f"1 to {max_sequence_tokens - 1} tokens"
        raise InvalidInput("the prompt does not fit", seen=len(prompt), allowed=allowed)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        seen = max(prompt) if min(prompt) >= 0 else min(prompt)
        raise InvalidInput(
            "a prompt token is out of range", seen=seen, allowed=f"0 to {vocab_size - 1}"
        )
    _check_sampling(request.sampling)
    _check_logit_bias(request.sampling.logit_bias, vocab_size)


def _check_sampling(sampling: Sampling) -> None:
    bounds = {
        "max_tokens": (sampling.max_tokens >= 1, sampling.max_tokens, ">= 1"),
        "temperature": (0 <= sampling.temperature < float("inf"), sampling.temperature, ">= 0"),
        "top_p": (0 < sampling.top_p <= 1, sampling.top_p, "0 < top_p <= 1"),
        "top_k": (sampling.top_k >= 0, sampling.top_k, ">= 0 (0: all)"),
        "min_p": (0 <= sampling.min_p <= 1, sampling.min_p, "0 to 1"),
        "stop": (all(sampling.stop), sampling.stop, "strings that are not empty"),
        "presence_penalty": (
            -2 <= sampling.presence_penalty <= 2,
            sampling.presence_penalty,
            "-2 to 2",
        ),
        "frequency_penalty": (
            -2 <= sampling.frequency_penalty <= 2,
            sampling.frequency_penalty,
            "-2 to 2",
        ),
        "repetition_penalty": (
            0.1 <= sampling.repetition_penalty <= 10,
            sampling.repetition_penalty,
            "0.1 to 10",
        ),
    }
    for name, (fine, seen, allowed) in bounds.items():
        if not fine:
            raise InvalidInput(f"{name} is out of range", seen=seen, allowed=allowed)


def _check_logit_bias(entries: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    if len(entries) > MAX_BIASED_TOKENS:
        raise InvalidInput(
            "logit_bias has too many entries", seen=len(entries), allowed=MAX_BIASED_TOKENS
        )
    for token, bias in entries:
        if not 0 <= token < vocab_size:
            raise InvalidInput(
                "logit_bias names a token out of range",
                seen=token,
                allowed=f"0 to {vocab_size - 1}",
            )
        if not -100 <= bias <= 100:
            raise InvalidInput(
                f"logit_bias of token {token} is out of range", seen=bias, allowed="-100 to 100"
            )
