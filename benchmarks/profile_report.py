"""Measures the costs and gains of a profile on a model: matrix errors, log-probs against float32,
bytes, and seconds of decoding and of an update.

It uses no engine of a gateway. Its own engine draws responses with the profile, at temperature 1.
The same weights score them in float32 without the profile. A gap is |engine's log-prob - float32
log-prob| of a drawn token. The divergence KL(engine, float32) is a sum over the vocabulary at each
drawn token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.models.cache import StaticCache
from paceline.models.config import ModelConfig, read_config
from paceline.models.decoder import DecoderWeights, forward_hidden, head_logits, make_block
from paceline.models.in_place import ServedModel, serve_staged, storages
from paceline.models.loading import DTYPES
from paceline.models.profiles import chosen_profile
from paceline.models.quantised import QuantisedMatrix
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Chunk, Request
from paceline.services.rollout_gateway.engines.sampling import Sampling

UPPER = 0.99
TIMED = 3
"""Number of timings; the fastest counts."""
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MatrixError:
    """Distance of a rounded matrix W' from W."""

    place: str  # e.g. layers.0.gate_up
    relative: float  # |W' - W| / |W|, Frobenius
    worst_row: float  # largest relative distance of a row


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Measurements of one profile on one model."""

    profile: str  # "": none
    dtype: str  # data type of the engine's computations
    matrices: tuple[MatrixError, ...]
    tokens: int  # drawn and scored
    gap_mean: float  # nats, as are the next three
    gap_upper: float  # 99th percentile
    gap_largest: float
    divergence: float
    bytes: int  # of the whole model as served
    tokens_per_s: float  # of all prompts decoding together
    prepare_s: float  # to read, round and stage a version
    commit_s: float  # to copy it into the storages that serve


class ScoredTokens(NamedTuple):
    """Log-probs of drawn tokens, float32 [T] each."""

    gaps: Tensor
    divergences: Tensor


def measure_profile(
    directory: Path, profile: str, prompts: Prompts, *, tokens: int, dtype: str, threads: int = 1
) -> ProfileReport:
    """Draws `tokens` tokens behind every prompt and measures the profile.

    Raises InvalidInput for prompts that leave no room, and any error of building an engine.
    """
    config = read_config(directory)
    longest = max(map(len, prompts), default=0) + tokens
    if not prompts or longest > config.max_position_embeddings:
        raise InvalidInput(
            "prompts and their responses have to fit into the model's context",
            seen=f"{len(prompts)} prompts, {longest} tokens with the response",
            allowed=f"1 prompt or more, {config.max_position_embeddings} tokens",
        )
    engine = profiled_engine(directory, profile, len(prompts), longest, dtype, threads)
    chunks, tokens_per_s = _drawn(engine, prompts, tokens)
    del engine
    served = ServedModel(config, DTYPES[dtype], longest, chosen_profile(profile))
    exact = ServedModel(config, torch.float32, longest).load(directory)
    with torch.inference_mode():
        weights = served.load(directory)
        found = [
            _compared(weights, exact, prompt, chunk)
            for prompt, chunk in zip(prompts, chunks, strict=True)
        ]
        errors = tuple(matrix_errors(weights, exact))
        prepare_s, commit_s = _update_seconds(served, weights, directory)
    gaps = torch.cat([one.gaps for one in found])
    return ProfileReport(
        profile=served.profile.name if served.profile else "",
        dtype=dtype,
        matrices=errors,
        tokens=len(gaps),
        gap_mean=float(gaps.mean()),
        gap_upper=float(gaps.quantile(UPPER)),
        gap_largest=float(gaps.max()),
        divergence=float(torch.cat([one.divergences for one in found]).mean()),
        bytes=sum(one.nbytes for one in storages(weights).values()),
        tokens_per_s=tokens_per_s,
        prepare_s=prepare_s,
        commit_s=commit_s,
    )


def matrix_errors(weights: DecoderWeights, exact: DecoderWeights) -> list[MatrixError]:
    """Errors of every rounded matrix, in the order of the layers."""
    found = []
    for index, (layer, whole) in enumerate(zip(weights.layers, exact.layers, strict=True)):
        for name in ("qkv", "output", "gate_up", "down"):
            matrix, wanted = getattr(layer, name), getattr(whole, name)
            if isinstance(matrix, QuantisedMatrix):
                off = matrix.whole() - wanted
                rows = off.norm(dim=1) / wanted.norm(dim=1).clamp(min=torch.finfo().tiny)
                relative = float(off.norm() / wanted.norm())
                found.append(MatrixError(f"layers.{index}.{name}", relative, float(rows.max())))
    return found


def profiled_engine(
    directory: Path, profile: str, rows: int, longest: int, dtype: str, threads: int
) -> Engine:
    """An engine that draws without drafts, for `rows` requests of at most `longest` tokens at a
    time.
    """
    settings = {
        "model_dir": str(directory),
        "profile": profile,
        "dtype": dtype,
        "threads": threads,
        "drafter": "off",
        "max_batch": rows,
        "max_sequence_tokens": longest,
        "prefix_slots": 0,
    }
    return EmbeddedEngine(EmbeddedSpec.model_validate(settings))


def _drawn(engine: Engine, prompts: Prompts, tokens: int) -> tuple[list[Chunk], float]:
    """Draws a response to each prompt, TIMED times; returns the chunks and the best tokens per
    second.
    """
    best = 0.0
    for _ in range(TIMED):
        began = time.perf_counter()
        chunks = draw_all(engine, prompts, tokens, ignore_eos=True)
        best = max(best, len(prompts) * tokens / (time.perf_counter() - began))
    return chunks, best


def draw_all(
    engine: Engine, prompts: Prompts, tokens: int, *, ignore_eos: bool = False
) -> list[Chunk]:
    """Draws a response to each prompt, at temperature 1 with the prompt's number as its seed."""
    for number, prompt in enumerate(prompts):
        sampling = Sampling(seed=number, max_tokens=tokens, temperature=1.0, ignore_eos=ignore_eos)
        engine.enqueue(Request(number, prompt, sampling))
    ended: dict[int, Chunk] = {}
    while engine.has_work:
        ended |= {chunk.request_id: chunk for chunk in engine.step()}
    return [ended[number] for number in range(len(prompts))]


def _compared(
    weights: DecoderWeights, exact: DecoderWeights, prompt: tuple[int, ...], chunk: Chunk
) -> ScoredTokens:
    ids = torch.tensor([(*prompt, *chunk.token_ids)])
    drawn = torch.tensor(chunk.token_ids)[:, None]
    wanted, seen = (logprobs(one, ids, len(prompt)) for one in (exact, weights))
    told = torch.tensor(chunk.behavior_logprobs, dtype=torch.float32)
    return ScoredTokens(
        (told - wanted.gather(1, drawn)[:, 0]).abs(), (seen.exp() * (seen - wanted)).sum(dim=1)
    )


def logprobs(weights: DecoderWeights, ids: Tensor, prompt: int) -> Tensor:
    """Log-probs of the vocabulary at the response's positions, float32 [T, V], in nats.

    ids: int64 [1, L], a prompt of `prompt` tokens and the response.
    """
    config: ModelConfig = weights.config
    length, device = ids.shape[1], weights.head.device
    cache = StaticCache(
        config,
        layers=config.num_layers,
        slots=1,
        capacity=length,
        dtype=weights.head.dtype,
        device=device,
    )
    positions = torch.arange(length, device=device)[None]
    block = make_block(config, weights.rotation, cache, slice(0, 1), positions, length)
    hidden = forward_hidden(weights, cache, ids.to(device), block)
    logits = head_logits(weights, hidden[prompt - 1 : length - 1]).float()
    return logits.log_softmax(dim=-1)


def _update_seconds(
    served: ServedModel, weights: DecoderWeights, directory: Path
) -> tuple[float, float]:
    """Seconds of a prepare and of a commit, the fastest of TIMED."""
    prepare_s, commit_s = [], []
    for _ in range(TIMED):
        began = time.perf_counter()
        staged = served.staged(directory)
        read = time.perf_counter()
        serve_staged(weights, staged)
        prepare_s.append(read - began)
        commit_s.append(time.perf_counter() - read)
    return min(prepare_s), min(commit_s)
