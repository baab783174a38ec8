"""Declares the scripted engine's input, and selects its response to a prompt."""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator
from tokenizers import Tokenizer

from paceline.arm_names import OFF
from paceline.config import Config
from paceline.errors import ConfigError, InvalidInput
from paceline.models.reading import read_text
from paceline.services.rollout_gateway.engines import nouns, settings
from paceline.services.rollout_gateway.engines.requests.sequence import DrawnBy, RunningSequence


def next_beat(now: float, last: float, seconds: float) -> float:
    """The first multiple of `seconds` after `now` that is not the `last` beat."""
    beat = (now // seconds + 1) * seconds
    return beat if beat > last + seconds / 2 else beat + seconds


class Line(Config):
    """The responses to one prompt; the seed selects a response."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...] = Field(min_length=1)


class Reply(Config):
    """The replies to prompts whose text matches a pattern; the seed selects a text."""

    # searched in the end of the decoded prompt, special tokens by their names
    pattern: re.Pattern[str]
    texts: tuple[str, ...] = Field(min_length=1)  # encoded by the tokenizer; the end token is added
    # None: the accept length of the round's arm
    tokens_per_round: int | None = Field(default=None, ge=1)


class ScriptedSpec(settings.BatchSettings, settings.RunValues):
    """Settings.

    A prompt without a Line or a Reply gets a response drawn from hash(prompt, seed).
    """

    file: str = ""  # JSON file of further settings, which override the gateway's
    model_dir: str = ""  # its tokenizer.json is needed only for stop strings and replies
    script: tuple[Line, ...] = ()  # precede the replies
    replies: tuple[Reply, ...] = ()  # the first that matches answers
    # End of a prompt in which patterns are searched.
    reply_window_chars: int = Field(default=4096, ge=1)
    vocab_size: int = 320
    hidden_size: int = 8
    eos_token_id: int = 1
    response_tokens: tuple[int, int] = (4, 32)  # bounds of unscripted responses, eos included
    arms: tuple[str, ...] = ("off", "eagle:3_1_4", "ngram:4_1_5")
    accept_lengths: dict[str, float] = Field(default={"eagle:3_1_4": 2.5, "ngram:4_1_5": 1.5})
    costs_s: dict[str, dict[int, float]] = Field(
        default_factory=lambda: {"off": {1: 1e-3, 8: 2e-3}, "eagle:3_1_4": {1: 1.2e-3, 8: 3e-3}}
    )  # arm -> batch size -> seconds of a round; the largest size not above the batch counts
    default_cost_s: float = 1e-3  # of arms without costs
    real_time: bool = False
    ends_with: str = ""  # path of a file; until it exists, only probes end
    fault_token: int | None = None  # a round over a prompt that holds this token raises
    nan_token: int | None = None  # the log-prob of this token is NaN
    nan_policies: tuple[int, ...] = ()  # policy versions that return only NaN log-probs
    # Accept length by drafter version; overrides accept_lengths.
    drafter_accept_lengths: dict[int, float] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values, and those of their file. Raises InvalidInput with the file's path."""
        path = values.get("file")
        if not path:
            return values
        try:
            found = cls.model_validate_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInput(f"the script {path} cannot be used: {error}") from error
        return values | found.model_dump(exclude_unset=True)


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


def round_cost(spec: ScriptedSpec, arm: str, batch: int) -> float:
    """Seconds of a round with `batch` requests."""
    table = spec.costs_s.get(arm, {})
    sizes = [size for size in table if size <= batch]
    return table[max(sizes)] if sizes else spec.default_cost_s


def drafts_of(arm: str) -> int:
    """Draft tokens per row of the arm `<speculator>:<steps>_<topk>_<draft tokens>`. The first node,
    the last accepted token, does not count.
    """
    return 0 if arm == OFF else int(arm.rpartition("_")[2]) - 1


TOKENS_PER_CHARACTER = 4
"""A UTF-8 character has at most four byte tokens; tokenizers with larger tokens need fewer."""


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """A response and its pace."""

    token_ids: tuple[int, ...]  # end token included
    tokens_per_round: int | None = None  # None: the accept length of the round's arm


class Script:
    """The answers of one script.

    Raises ConfigError where replies have no tokenizer or it cannot be read, InvalidInput for
    foreign tokens.
    """

    def __init__(self, spec: ScriptedSpec) -> None:
        tokenizer = read_text(Path(spec.model_dir)).tokenizer() if spec.model_dir else None
        if spec.replies and tokenizer is None:
            raise ConfigError("replies need a tokenizer", seen="no model", allowed="gateway.model")
        self._spec = spec
        self._tokenizer = tokenizer
        self._prompts = {line.prompt for line in spec.script}
        self._replies = [
            (reply.pattern, _encoded(reply, spec, tokenizer))
            for reply in spec.replies
            if tokenizer is not None
        ]

    def answer(self, prompt: tuple[int, ...], seed: int) -> ScriptedAnswer:
        """The line of exactly this prompt, else the first reply with a matching pattern, else a
        draw.
        """
        if self._replies and prompt not in self._prompts:
            text = self._end_of(prompt)
            for pattern, answers in self._replies:
                if pattern.search(text):
                    return answers[seed % len(answers)]
        return ScriptedAnswer(scripted_response(self._spec, prompt, seed))

    def _end_of(self, prompt: tuple[int, ...]) -> str:
        """The last characters of a prompt, with special tokens by name. Only the tokens of this
        window are decoded.
        """
        assert self._tokenizer is not None
        size = self._spec.reply_window_chars
        tail = prompt[-TOKENS_PER_CHARACTER * (size + 1) :]
        return str(self._tokenizer.decode(list(tail), skip_special_tokens=False))[-size:]


def _encoded(reply: Reply, spec: ScriptedSpec, tokenizer: Tokenizer) -> list[ScriptedAnswer]:
    answers = []
    for text in reply.texts:
        token_ids = (*tokenizer.encode(text, add_special_tokens=False).ids, spec.eos_token_id)
        if max(token_ids) >= spec.vocab_size:
            message = f"a text of the reply {reply.pattern.pattern!r} has a token out of range"
            raise InvalidInput(message, seen=max(token_ids), allowed=spec.vocab_size - 1)
        answers.append(ScriptedAnswer(token_ids, reply.tokens_per_round))
    return answers


@dataclass(eq=False, slots=True)
class ScriptedRun:
    """A running request."""

    sequence: RunningSequence
    answer: ScriptedAnswer
    rows_written: int = 0  # positions with written rows
    credit: float = 0.0  # fraction of accepted tokens carried to the next round
    nan_token: int | None = None

    @property
    def request(self) -> nouns.Request:
        """The engine's request."""
        return self.sequence.request

    def ends_within(self, tokens: int) -> bool:
        """Whether `tokens` further tokens would end the response."""
        whole = self.sequence.token_limit
        if not self.request.sampling.ignore_eos:
            whole = min(whole, len(self.answer.token_ids))
        return whole - len(self.sequence.tokens) <= tokens

    def emit(self, wanted: int, origin: DrawnBy, *, nan: bool = False) -> int:
        """Emit at most `wanted` further tokens; returns their number. nan: all log-probs are NaN.

        A response that must continue after its end starts again.
        """
        sequence, script = self.sequence, self.answer.token_ids
        start, endless = len(sequence.tokens), self.request.sampling.ignore_eos
        count = wanted if endless else min(wanted, len(script) - start)
        tokens = [script[index % len(script)] for index in range(start, start + count)]
        logprobs = [
            math.nan if nan or one == self.nan_token else scripted_logprob(one) for one in tokens
        ]
        accepted = count - 1 if origin.arm != OFF else 0
        taken = sequence.append_tokens(tokens, logprobs, [1.0] * count, origin, accepted)
        asked = self.request.sampling.top_logprobs
        sequence.alternatives += [_alternatives(token, asked) for token in tokens[:taken]]
        if sequence.finish is None and not endless and len(sequence.tokens) == len(script):
            sequence.finish = nouns.Finish.STOP
        return taken

    def unwritten(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Tokens and positions with rows to write. The last token is missing, because the next
        round would compute its state.
        """
        sequence = np.array((*self.request.prompt, *self.sequence.tokens), dtype=np.uint32)
        start, end = self.rows_written, len(sequence) - 1
        self.rows_written = end
        return sequence[start:end], np.arange(start, end, dtype=np.uint32)


def _alternatives(token: int, count: int) -> tuple[tuple[int, float], ...]:
    return tuple((token + rank, scripted_logprob(token) - rank) for rank in range(count))
