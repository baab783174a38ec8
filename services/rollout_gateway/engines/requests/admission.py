"""Admits requests to an engine that runs a model, and determines where each request ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig
from paceline.models.reading import read_text
from paceline.services.rollout_gateway.engines.nouns import Capability, Request, missing
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.requests.stop_texts import StopText, TokenNames
from paceline.services.rollout_gateway.engines.requests.structures import beyond_json
from paceline.services.rollout_gateway.engines.sampling import (
    Sampling,
    check_prompt,
    check_sampling,
)


def check_capabilities(engine: str, capabilities: Collection[Capability], request: Request) -> None:
    """Raises MissingCapability for a request that needs an undeclared capability of the engine."""
    asked = {
        Capability.CAPTURE: request.capture,
        Capability.PENALTIES: request.sampling.adjusted,
        Capability.PROMPT_LOGPROBS: request.sampling.scored,
        Capability.JSON_SCHEMA: bool(request.sampling.json_schema),
        Capability.GRAMMARS: beyond_json(request.sampling),
    }
    for capability, wanted in asked.items():
        if wanted and capability not in capabilities:
            raise missing(engine, capability)


class Admission:
    """Turns requests into sequences."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        tokenizer: Path,
        max_sequence_tokens: int,
    ) -> None:
        """tokenizer: path of a tokenizer.json, which stop strings need."""
        self.max_sequence_tokens = max_sequence_tokens
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._tokenizer_path = tokenizer
        self._words: tuple[Tokenizer, TokenNames] | None = None

    @classmethod
    def of_model(cls, config: ModelConfig, model_dir: Path, max_sequence_tokens: int) -> Admission:
        """Admission for a model; no sequence is longer than the model's context."""
        longest = min(max_sequence_tokens, config.max_position_embeddings)
        tokenizer = model_dir / "tokenizer.json"
        return cls(config.vocab_size, config.eos_token_ids, tokenizer, longest)

    def sequence(self, request: Request) -> RunningSequence:
        """A sequence that waits for a slot. Raises InvalidInput naming the rejected value."""
        prompt, sampling, said = request.prompt, request.sampling, request.response
        check_prompt(prompt, self._vocab_size, self.max_sequence_tokens)
        check_sampling(sampling, self._vocab_size)
        limit = min(sampling.max_tokens, self.max_sequence_tokens - len(prompt))
        if said:
            check_prompt(request.known, self._vocab_size, self.max_sequence_tokens)
            if len(said) >= limit:
                raise InvalidInput(
                    "a response that has ended cannot go on", seen=len(said), allowed=limit - 1
                )

        eos = () if sampling.ignore_eos else self._eos
        self._check_room(sampling, limit, frozenset((*eos, *sampling.stop_token_ids)))
        return RunningSequence(
            request=request,
            stop_ids=frozenset((*eos, *sampling.stop_token_ids)),
            token_limit=limit,
            stop_text=self._stop_text(sampling.stop) if sampling.stop else None,
            length=len(request.known),
            tokens=list(said),
            logprobs=[0.0] * len(said),
            accepted_drafts=[False] * len(said),
            alternatives=[()] * len(said),
            told=len(said),
        )

    def _check_room(self, sampling: Sampling, limit: int, stops: frozenset[int]) -> None:
        """Raises InvalidInput for a response that must end before min_tokens allows it."""
        if not sampling.min_tokens:
            return
        if sampling.min_tokens > limit:
            raise InvalidInput(
                "min_tokens does not fit behind the prompt", seen=sampling.min_tokens, allowed=limit
            )
        drawable = set(sampling.allowed_token_ids) or set(range(self._vocab_size))
        if drawable <= stops:
            raise InvalidInput(
                "min_tokens leaves no token that could be drawn",
                seen="stops alone in allowed_token_ids" if sampling.allowed_token_ids else "stops",
                allowed="a token that ends nothing",
            )

    def _stop_text(self, stops: tuple[str, ...]) -> StopText:
        if self._words is None:
            if not self._tokenizer_path.is_file():
                raise InvalidInput("stop strings need a tokenizer.json", seen=self._tokenizer_path)
            tokenizer = read_text(self._tokenizer_path.parent).tokenizer()
            self._words = tokenizer, TokenNames(tokenizer, self._eos)
        tokenizer, names = self._words
        return StopText(tokenizer, stops, names)
