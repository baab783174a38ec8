"""Times an engine, or transformers, in this process from the first round to the last; compared runs
take turns.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import Ratio, paired_ratio, say
from paceline.errors import InvalidInput
from paceline.models.loading import DTYPES
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.nouns import Chunk, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.trajectory import NEAR_TIE_GAP


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run, in waves of `batch` requests at once. The next wave begins when the last
    request of a wave has ended.
    """

    requests: tuple[Request, ...]
    batch: int

    @property
    def waves(self) -> list[tuple[Request, ...]]:
        """The requests of each wave."""
        return [self.requests[i : i + self.batch] for i in range(0, len(self.requests), self.batch)]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens that one request got, its stop token included."""

    tokens: tuple[int, ...]
    smallest_gap: float = float("inf")  # perturbed top-two gap; infinite if unavailable


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One workload from the first to the last token, prompts included in the seconds."""

    seconds: float
    answers: tuple[Decoded, ...]  # in the order of the requests
    rounds: int = 0
    # tokens per drafted round of a sequence; None when nothing was drafted
    accept_length: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Way = Callable[[], TimedRun]


@dataclass(frozen=True, slots=True)
class Flips:
    """Differences of two runs with the same seeds."""

    sequences: int
    flipped: int  # sequences with other tokens
    near_ties: int  # flipped sequences with a top-two gap below NEAR_TIE_GAP
    tokens: int
    behind: int  # tokens from a sequence's first difference on

    def __add__(self, other: Flips) -> Flips:
        """Sums both comparisons."""
        return Flips(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def unexplained(self) -> int:
        """Sequences that differ without a near-tie."""
        return self.flipped - self.near_ties


def held_out_prompts(demo: Path, count: int) -> list[tuple[int, ...]]:
    """Token ids of the demo's first held-out prompts."""
    codec = TextCodec(demo / "policy_trained")
    with (demo / "tasks_heldout.jsonl").open(encoding="utf-8") as lines:
        return [
            codec.encode(json.loads(line)["prompt"])
            for line, _ in zip(lines, range(count), strict=False)
        ]


def workload(
    prompts: Sequence[tuple[int, ...]],
    batch: int,
    max_tokens: int,
    *,
    greedy: bool = False,
    ignore_eos: bool = False,
) -> Workload:
    """One request per prompt; a request's number is its seed."""
    temperature = 0.0 if greedy else 1.0
    return Workload(
        tuple(
            Request(
                i,
                prompt,
                Sampling(
                    seed=i, max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos
                ),
            )
            for i, prompt in enumerate(prompts)
        ),
        batch,
    )


def even_waves(pool: Workload, lengths: Sequence[int], batch: int, waves: int) -> Workload:
    """Makes waves of requests with about equally long responses, so that a batch stays full almost
    to its end.

    lengths: response tokens of the pool's requests. The waves are at even quantiles of length, (w +
    1/2) / waves. Requests keep their numbers and seeds. Raises InvalidInput if the pool is too
    small.
    """
    if batch * waves > len(lengths):
        raise InvalidInput(
            "the pool is too small for these waves",
            seen=batch * waves,
            allowed=f"<= {len(lengths)}",
        )

    ascending = [
        request
        for _, request in sorted(zip(lengths, pool.requests, strict=True), key=lambda pair: pair[0])
    ]
    share = len(ascending) / waves
    starts = [int(share * wave + (share - batch) / 2) for wave in range(waves)]
    return Workload(
        tuple(request for start in starts for request in ascending[start : start + batch]), batch
    )


def decode(engine: Engine, work: Workload, arm: str, threads: int) -> TimedRun:
    """Decodes all waves with one arm; "" lets the engine's bandit choose."""
    torch.set_num_threads(threads)
    engine.force_arm(arm)
    # runs repeat requests: no request may be drafted or prefilled from the run before
    engine.flush_cache()
    ended: dict[int, Chunk] = {}
    rounds = 0
    began = time.perf_counter()
    for wave in work.waves:
        for request in wave:
            engine.enqueue(request)
        while engine.has_work:
            ended |= {chunk.request_id: chunk for chunk in engine.step()}
            rounds += 1

    seconds = time.perf_counter() - began
    chunks = [ended[request.request_id] for request in work.requests]
    drafted = sum(chunk.speculation.drafted_rounds for chunk in chunks)
    gained = sum(chunk.speculation.drafted_round_tokens for chunk in chunks)
    answers = tuple(Decoded(chunk.token_ids, chunk.smallest_gap) for chunk in chunks)
    return TimedRun(seconds, answers, rounds, gained / drafted if drafted else None)


async def take_turns(ways: Mapping[str, Way], pairs: int, what: str) -> dict[str, list[TimedRun]]:
    """Runs every way once per pair; the first way changes from pair to pair.

    One more pair before the measured pairs warms up.
    """
    names = list(ways)
    runs: dict[str, list[TimedRun]] = {name: [] for name in names}
    for number in range(pairs + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            one = ways[name]()
            if number:
                runs[name].append(one)
            await asyncio.sleep(0)  # a run blocks the loop: here Ctrl-C gets through

    say(
        f"{what}: "
        + ", ".join(f"{name} {median_rate(several):,.0f}" for name, several in runs.items())
        + " tokens/s"
    )
    return runs


def median_rate(runs: Sequence[TimedRun]) -> float:
    """Median tokens per second."""
    return statistics.median(one.rate for one in runs)


def rate_ratio(ours: Sequence[TimedRun], theirs: Sequence[TimedRun]) -> Ratio:
    """Tokens per second of `ours` over `theirs`, pair by pair."""
    return paired_ratio([one.rate for one in ours], [one.rate for one in theirs])


def flips(reference: Sequence[Decoded], other: Sequence[Decoded]) -> Flips:
    """Compares answers to the same requests."""
    pairs = [
        (one, two) for one, two in zip(reference, other, strict=True) if one.tokens != two.tokens
    ]
    return Flips(
        sequences=len(reference),
        flipped=len(pairs),
        near_ties=sum(min(one.smallest_gap, two.smallest_gap) < NEAR_TIE_GAP for one, two in pairs),
        tokens=sum(len(answer.tokens) for answer in reference),
        behind=sum(len(one.tokens) - _equal_tokens(one.tokens, two.tokens) for one, two in pairs),
    )


def _equal_tokens(one: Sequence[int], two: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b),
        min(len(one), len(two)),
    )


PROMPT_LOOKUP = {"prompt_lookup_num_tokens": 10}
"""The length that transformers' documentation uses."""


class TransformersModel:
    """A checkpoint in transformers, which generates greedily for the engine's requests.

    Its own speculation is prompt lookup (Saxena 2023) and assisted generation (Leviathan et al.
    2023), both with the library's settings.
    """

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        import transformers  # here, so that the section on memory does not count it

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[dtype]
        ).eval()
        config = self.model.generation_config
        ends = config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [ends])
        self._pad = config.pad_token_id if config.pad_token_id is not None else min(self._ends)

    @torch.inference_mode()
    def generate(
        self, work: Workload, threads: int, how: Mapping[str, Any] | None = None
    ) -> TimedRun:
        """Generates for each wave as one left-padded batch.

        Raises InvalidInput for requests that are not greedy.
        """
        for request in work.requests:
            if request.sampling.temperature:
                raise InvalidInput(
                    "only greedy decoding gives both sides the same tokens",
                    seen=request.sampling.temperature,
                    allowed="temperature 0",
                )

        torch.set_num_threads(threads)
        answers: list[Decoded] = []
        began = time.perf_counter()
        for wave in work.waves:
            answers += self._wave(wave, dict(how or {}))
        return TimedRun(time.perf_counter() - began, tuple(answers))

    def _wave(self, wave: Sequence[Request], how: dict[str, Any]) -> list[Decoded]:
        width = max(len(request.prompt) for request in wave)
        padding = [width - len(request.prompt) for request in wave]
        rows = [
            [self._pad] * pad + list(request.prompt)
            for pad, request in zip(padding, wave, strict=True)
        ]
        seen = [[0] * pad + [1] * (width - pad) for pad in padding]
        out = self.model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(seen),
            max_new_tokens=wave[0].sampling.max_tokens,
            do_sample=False,
            pad_token_id=self._pad,
            **how,
        )
        return [Decoded(self._until_end(row)) for row in out[:, width:].tolist()]

    def _until_end(self, row: list[int]) -> tuple[int, ...]:
        end = next((index + 1 for index, token in enumerate(row) if token in self._ends), len(row))
        return tuple(row[:end])
