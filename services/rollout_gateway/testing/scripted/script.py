"""Declares the scripted engine's input: prompts and responses, costs, clocks, rows."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, field_validator

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.engines.settings import BatchSettings, RunValues


class Clock(Protocol):
    """The engine's time in seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def spend(self, seconds: float) -> None:
        """Let seconds pass."""
        ...


class VirtualClock:
    """Time passes only through `spend`; nothing sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def spend(self, seconds: float) -> None:
        self._now += seconds


class RealClock:
    """`spend` sleeps until the next multiple of the seconds, so that work between two rounds does
    not slow the pace.

    For benches. A round that starts in the middle of its interval ends early; a round that was busy
    for longer skips a beat.
    """

    def __init__(self) -> None:
        self._until = 0.0

    def now(self) -> float:
        return time.perf_counter()

    def spend(self, seconds: float) -> None:
        if seconds:
            self._until = next_beat(self.now(), self._until, seconds)
            time.sleep(max(self._until - self.now(), 0))


def next_beat(now: float, last: float, seconds: float) -> float:
    """The first multiple of `seconds` after `now` that is not the `last` beat."""
    beat = (now // seconds + 1) * seconds
    return beat if beat > last + seconds / 2 else beat + seconds


class Line(BaseModel):
    """The responses to one prompt; the seed selects a response."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...] = Field(min_length=1)


class Reply(BaseModel):
    """The replies to prompts whose text matches a pattern; the seed selects a text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # regular expression, searched in the end of the decoded prompt, special tokens by their names
    pattern: str
    texts: tuple[str, ...] = Field(min_length=1)  # encoded by the tokenizer; the end token is added
    # None: the accept length of the round's arm
    tokens_per_round: int | None = Field(default=None, ge=1)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


class ScriptedSpec(BatchSettings, RunValues):
    """Settings.

    A prompt without a Line or a Reply gets a response drawn from hash(prompt, seed).
    """

    script: tuple[Line, ...] = ()  # precede the replies
    replies: tuple[Reply, ...] = ()  # the first that matches answers
    # End of a prompt in which patterns are searched.
    reply_window_chars: int = Field(default=4096, ge=1)
    vocab_size: int = 320
    hidden_size: int = 8
    eos_token_id: int = 1
    response_tokens: tuple[int, int] = (4, 32)  # bounds of unscripted responses, eos included
    tokenizer: str = ""  # tokenizer.json; needed only for stop strings and replies
    arms: tuple[str, ...] = ("off", "eagle:3_1_4", "ngram:4_1_5")
    accept_lengths: dict[str, float] = Field(
        default_factory=lambda: {"eagle:3_1_4": 2.5, "ngram:4_1_5": 1.5}
    )
    costs_s: dict[str, dict[int, float]] = Field(
        default_factory=lambda: {"off": {1: 1e-3, 8: 2e-3}, "eagle:3_1_4": {1: 1.2e-3, 8: 3e-3}}
    )  # arm -> batch size -> seconds of a round; the largest size not above the batch counts
    default_cost_s: float = 1e-3  # of arms without costs
    real_time: bool = False
    ends_with: str = ""  # path of a file; until it exists, only probes end
    fault_token: int | None = None  # a round over a prompt that holds this token raises
    nan_token: int | None = None  # its log-prob is NaN
    nan_policies: tuple[int, ...] = ()  # policy versions that return only NaN log-probs
    # Accept length by drafter version; overrides accept_lengths.
    drafter_accept_lengths: dict[int, float] = Field(default={})


def scripted_response(spec: ScriptedSpec, prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Response to a prompt that no reply matches, eos included; the oracle of tests."""
    for line in spec.script:
        if line.prompt == prompt:
            return line.responses[seed % len(line.responses)]
    digest = hashlib.sha256(repr((prompt, seed)).encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    low, high = spec.response_tokens
    body = rng.integers(3, spec.vocab_size, size=int(rng.integers(low, high + 1)) - 1)
    return (*(int(token) for token in body), spec.eos_token_id)


def scripted_rows(
    token_ids: npt.NDArray[np.uint32],
    positions: npt.NDArray[np.uint32],
    hidden_size: int,
    dtype: str,
) -> npt.NDArray[np.uint8]:
    """Hidden rows [n, row bytes] as a function of token and position: h_i = ((31 token + 7 position
    + i) % 256) / 256.

    All values are exact in bfloat16.
    """
    base = 31 * token_ids.astype(np.int64) + 7 * positions.astype(np.int64)
    values = (((base[:, None] + np.arange(hidden_size)) % 256) / 256).astype("<f4")
    if dtype == "float32":
        return values.view(np.uint8)
    return (values.view("<u4") >> 16).astype("<u2").view(np.uint8)


def scripted_logprob(token_id: int) -> float:
    """Behavior log-prob of a token, in (-1, 0)."""
    return -(1 + token_id % 7) / 8


def read_script(path: Path) -> dict[str, Any]:
    """Read settings stored as JSON, for the gateway's `engine.script`.

    Raises InvalidInput with the file's path.
    """
    try:
        return ScriptedSpec.model_validate_json(path.read_text(encoding="utf-8")).model_dump(
            exclude_unset=True
        )
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the script {path} cannot be used: {error}") from error


CLOCKS: dict[bool, Callable[[], Clock]] = {False: VirtualClock, True: RealClock}
