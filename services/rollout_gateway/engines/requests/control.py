"""Admits requests to an engine, and tracks its versions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tokenizers import Tokenizer

from paceline.errors import FailedPrecondition, InvalidInput, WeightsError
from paceline.models.config import ModelConfig
from paceline.models.reading import read_text
from paceline.services.rollout_gateway.bandits.base import Situation
from paceline.services.rollout_gateway.engines.nouns import Capability, Request, missing
from paceline.services.rollout_gateway.engines.requests import stop_texts, structures
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.sampling import (
    Sampling,
    check_prompt,
    check_sampling,
)
from paceline.trajectory import Target, VersionSet


def check_arm(name: str, arms: Collection[str]) -> None:
    """Raises InvalidInput for an arm outside `arms`; the empty name is accepted."""
    if name and name not in arms:
        raise InvalidInput("unknown arm", seen=name, allowed=", ".join(arms))


def situation_of(rows: Sequence[RunningSequence | None]) -> Situation:
    """The batch in the bandit's form. None represents a request that has ended."""
    context = max((one.length for one in rows if one is not None), default=1)
    return Situation(len(rows), context)


def check_idle(running: int) -> None:
    """Raises FailedPrecondition while requests run or wait."""
    if running:
        raise FailedPrecondition("requests run; abort them or wait", seen=running, allowed=0)


def check_held(released: bool) -> None:
    """Raises FailedPrecondition for a request while memory is released."""
    if released:
        message = "the engine has released its memory; resume it first"
        raise FailedPrecondition(message, seen="released", allowed="memory in use")


PREPARED_AT_MOST = 2
"""Most versions of one target that may wait for their commit; preparing more drops the oldest."""
S = TypeVar("S")
Part = tuple[int, str]
"""A version, and the profile that its policy is rounded to."""


class PreparedVersions(Generic[S]):
    """The serving set, and the prepared states of versions that may follow."""

    def __init__(self, profile: str = "") -> None:
        """`profile`: number format that the engine's first policy is rounded to."""
        self.serving = VersionSet(profile=profile)
        self._prepared: dict[Target, dict[Part, S]] = {target: {} for target in Target}

    def put(self, target: Target, version: int, state: S, profile: str = "") -> None:
        """Keep the state of a version that has been read and checked, a policy under a profile."""
        prepared = self._prepared[target]
        prepared[version, profile] = state
        while len(prepared) > PREPARED_AT_MOST:
            prepared.pop(next(iter(prepared)))

    def forget(self, target: Target, version: int) -> None:
        """Drop a prepared version, if present, under every profile."""
        prepared = self._prepared[target]
        for part in [part for part in prepared if part[0] == version]:
            del prepared[part]

    def changes(self, versions: VersionSet) -> dict[Target, S]:
        """States that a commit of this set would change, by target.

        Raises WeightsError when a part is not prepared or the set is older than the serving set.
        """
        if versions.seq < self.serving.seq:
            message = "an older set may not follow a newer one"
            raise WeightsError(message, seen=versions.seq, allowed=self.serving.seq)

        found: dict[Target, S] = {}
        for target, prepared in self._prepared.items():
            part, serving = _part(versions, target), _part(self.serving, target)
            if part in prepared:
                found[target] = prepared[part]
            elif part != serving:
                message, reason = f"this {target} version is not prepared", "WEIGHTS_NOT_PREPARED"
                allowed = ", ".join(map(_words, sorted({serving, *prepared})))
                raise WeightsError(message, seen=_words(part), allowed=allowed, reason=reason)

        return found

    def serve(self, versions: VersionSet) -> None:
        """Make the set the serving set; its parts are no longer kept as prepared."""
        self.serving = versions
        for target in Target:
            self.forget(target, getattr(versions, target))


def _part(versions: VersionSet, target: Target) -> Part:
    return getattr(versions, target), versions.profile if target is Target.POLICY else ""


def _words(part: Part) -> str:
    version, profile = part
    return f"{version} under {profile}" if profile else str(version)


def demands(sampling: Sampling) -> dict[Capability, str]:
    """The parameters that need a capability, as an error names them; empty: none does."""
    adjusting = "a penalty or logit_bias" if sampling.adjusted else ""
    if sampling.confined:
        adjusting = "min_tokens" if sampling.min_tokens else "allowed_token_ids"
    structured = structures.beyond_json(sampling)
    return {
        Capability.PENALTIES: adjusting,
        Capability.PROMPT_LOGPROBS: "prompt_logprobs" if sampling.scored else "",
        Capability.JSON_SCHEMA: "response_format" if sampling.json_schema else "",
        Capability.GRAMMARS: "structured_outputs or a strict tool" if structured else "",
    }


def check_capabilities(engine: str, capabilities: Collection[Capability], request: Request) -> None:
    """Raises MissingCapability for a request that needs an undeclared capability of the engine."""
    asked = {Capability.CAPTURE: request.capture, **demands(request.sampling)}
    for capability, wanted in asked.items():
        if wanted and capability not in capabilities:
            raise missing(engine, capability)


@dataclass(eq=False)
class Admission:
    """Turns requests into sequences."""

    _vocab_size: int
    _eos: Sequence[int]
    _tokenizer_path: Path  # of a tokenizer.json, which stop strings need
    max_sequence_tokens: int
    _words: tuple[Tokenizer, stop_texts.TokenNames] | None = None

    @classmethod
    def of_model(cls, config: ModelConfig, model_dir: Path, max_sequence_tokens: int) -> Admission:
        """Admission for a model; no sequence is longer than the model's context."""
        longest = min(max_sequence_tokens, config.max_position_embeddings)
        tokenizer = model_dir / "tokenizer.json"
        return cls(config.vocab_size, config.eos_token_ids, tokenizer, longest)

    def sequence(self, request: Request) -> RunningSequence:
        """A sequence that waits for a slot. Raises InvalidInput naming the rejected value."""
        prompt, sampling, response = request.prompt, request.sampling, request.response
        check_prompt(prompt, self._vocab_size, self.max_sequence_tokens)
        check_prompt(request.known, self._vocab_size, self.max_sequence_tokens)
        check_sampling(sampling, self._vocab_size)
        limit = min(sampling.max_tokens, self.max_sequence_tokens - len(prompt))
        if response and len(response) >= limit:
            message = "a response that has ended cannot go on"
            raise InvalidInput(message, seen=len(response), allowed=limit - 1)

        eos = () if sampling.ignore_eos else self._eos
        stop_ids = frozenset((*eos, *sampling.stop_token_ids))
        self._check_room(sampling, limit, stop_ids)
        return RunningSequence(
            request=request,
            stop_ids=stop_ids,
            token_limit=limit,
            stop_text=self._stop_text(sampling.stop) if sampling.stop else None,
            length=len(request.known),
            tokens=list(response),
            logprobs=[0.0] * len(response),
            accepted_drafts=[False] * len(response),
            alternatives=[()] * len(response),
            reported=len(response),
        )

    def _check_room(self, sampling: Sampling, limit: int, stops: frozenset[int]) -> None:
        """Raises InvalidInput for a response that must end before min_tokens allows it."""
        if not sampling.min_tokens:
            return
        if sampling.min_tokens > limit:
            message = "min_tokens does not fit behind the prompt"
            raise InvalidInput(message, seen=sampling.min_tokens, allowed=limit)
        drawable = set(sampling.allowed_token_ids) or set(range(self._vocab_size))
        if drawable <= stops:
            message = "min_tokens leaves no token that could be drawn"
            seen = "stops alone in allowed_token_ids" if sampling.allowed_token_ids else "stops"
            raise InvalidInput(message, seen=seen, allowed="a token that ends nothing")

    def _stop_text(self, stops: tuple[str, ...]) -> stop_texts.StopText:
        if self._words is None:
            if not self._tokenizer_path.is_file():
                raise InvalidInput("stop strings need a tokenizer.json", seen=self._tokenizer_path)
            tokenizer = read_text(self._tokenizer_path.parent).tokenizer()
            self._words = tokenizer, stop_texts.TokenNames(tokenizer, self._eos)
        tokenizer, names = self._words
        return stop_texts.StopText(tokenizer, stops, names)
