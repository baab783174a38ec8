"""Measures samples per second of an EAGLE drafter's training: packed into one row, and padded to
the longest sample of a batch.

The bench `drafter` runs it as a process: `python -m benchmarks.packing`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer.rows.sample import FeatureSample, pack
from paceline.speculators.eagle import EagleNet, EagleOptions
from paceline.speculators.net import Objective
from paceline.speculators.packed import PackedRow

DEMO = ModelConfig(
    family="llama",
    vocab_size=320,
    hidden_size=128,
    intermediate_size=352,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
)
"""Shape of the demo's policy."""
LOG_MEAN, LOG_DEVIATION, SHORTEST, LONGEST, PROMPT = 3.12, 0.66, 11, 231, 7
"""Tokens of the demo's sequences with their prompts: mean and deviation of the logarithm, shortest
and longest; then tokens of a prompt.

Taken from rollouts of its start policy at temperature 1 on 512 training tasks: median 21, mean 29,
90th percentile 56.
"""


@dataclass(frozen=True, slots=True)
class PackingRates:
    """Medians over batches, each trained once in either form."""

    packed: float  # samples/s
    padded: float
    ratio: float  # of packed to padded samples/s, batch by batch
    quartiles: tuple[float, float]  # of the ratio
    filled: float  # share of a padded batch that is no padding


def draw_samples(count: int, seed: int, hidden_size: int = DEMO.hidden_size) -> list[FeatureSample]:
    """Random states (float32 [T - 1, hidden_size]) and tokens (int64 [T]) of sequences as long as
    the demo's.
    """
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    samples = []
    for tokens in (
        random.lognormal(LOG_MEAN, LOG_DEVIATION, count)
        .clip(SHORTEST, LONGEST)
        .astype(int)
        .tolist()
    ):
        hidden = torch.randn(tokens - 1, hidden_size, generator=generator)
        ids = torch.randint(0, DEMO.vocab_size, (tokens,), generator=generator)
        samples.append(
            FeatureSample(
                "", 0, 0, "0" * 16, hidden, ids, torch.arange(tokens) >= PROMPT, hidden_size
            )
        )

    return samples


def packed_loss(net: EagleNet, samples: Sequence[FeatureSample]) -> Objective:
    """Trains on all samples in one row."""
    return net(pack(samples, window=LONGEST))


def padded_loss(net: EagleNet, samples: Sequence[FeatureSample]) -> Objective:
    """Trains on one row per sample, padded with zeros that no position may see."""
    states, targets, tokens, valid = (
        pad_sequence(part, batch_first=True)
        for part in (
            [one.hidden[:-1] for one in samples],
            [one.hidden[1:] for one in samples],
            [one.token_ids[1:-1] for one in samples],
            [one.generated[2:] for one in samples],
        )
    )
    count, longest = tokens.shape
    there = torch.arange(longest) < torch.tensor([one.positions for one in samples])[:, None]
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    positions = torch.arange(longest).expand(count, -1)
    features = net.features(states, tokens, positions, causal & there[:, None])
    flat = tokens.flatten()
    row = PackedRow(
        states=states.flatten(0, 1),
        next_states=targets.flatten(0, 1),
        next_tokens=flat,
        draft_tokens=flat,
        positions=positions.flatten(),
        documents=torch.arange(count).repeat_interleave(longest),
        valid=valid.flatten(),
        lm_head_hash="",
    )
    row = row.taught(net.head)
    every = torch.arange(len(row))
    loss, terms = net.objective(row, features.flatten(0, 1), every, torch.ones_like(row.valid))
    return Objective(loss, row.valid.sum(), terms)


def compare(batches: int = 40, *, samples: int = 32, seed: int = 0) -> PackingRates:
    """Trains `batches` batches of `samples` sequences in both forms; the form that begins
    alternates.
    """
    generator = torch.Generator().manual_seed(seed)
    forms: tuple[Callable[[EagleNet, Sequence[FeatureSample]], Objective], ...] = (
        packed_loss,
        padded_loss,
    )
    nets = [EagleNet(DEMO, EagleOptions(ttt_steps=1), seed=seed) for _ in forms]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets]
    for net in nets:
        net.bind(*torch.randn(2, DEMO.vocab_size, DEMO.hidden_size, generator=generator))
    seconds, filled = np.zeros((batches, 2)), np.zeros(batches)
    for batch in range(-2, batches):  # two to warm up
        drawn = draw_samples(samples, seed + 2 + batch)
        for form in (0, 1) if batch % 2 else (1, 0):
            started = time.perf_counter()
            objective = forms[form](nets[form], drawn)
            (objective.loss / objective.positions).backward()
            optimizers[form].step()
            optimizers[form].zero_grad()
            seconds[batch, form] = time.perf_counter() - started
        lengths = [one.positions for one in drawn]
        filled[batch] = np.mean(lengths) / max(lengths)

    ratios = seconds[:, 1] / seconds[:, 0]
    packed, padded = (samples / np.median(seconds, axis=0)).tolist()
    low, high = np.quantile(ratios, (0.25, 0.75)).tolist()
    return PackingRates(
        packed, padded, float(np.median(ratios)), (low, high), float(np.median(filled))
    )


def main() -> None:
    """Prints the rates of both batch sizes; --json writes the ratio of the larger size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the ratio to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in (8, 32):
        found = compare(samples=size)
        print(
            f"batches of {size:3}: packed {found.packed:.0f} samples/s, padded {found.padded:.0f} "
            f"samples/s, "
            f"{found.ratio:.2f}x (quartiles {found.quartiles[0]:.2f} to {found.quartiles[1]:.2f}), "
            f"{found.filled:.0%} of a padded batch is no padding"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"samples": size, "ratio": found.ratio}) + "\n")


if __name__ == "__main__":
    main()
