"""Draws the model's own answers to the prompts of the data, as targets for drafters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.errors import InvalidInput
from paceline.services.drafter_trainer.offline.config import OfflineConfig
from paceline.services.drafter_trainer.offline.data import Example, fingerprint
from paceline.training.process import from_all_ranks

BATCH = 16
"""Number of prompts that one rank answers at a time."""


def answer_prompts(
    lm: Any,
    samples: Sequence[Example],
    config: OfflineConfig,
    limit: int,
    tell: Callable[[int, int], None],
) -> list[Example]:
    """One sample per prompt with the model's own answer, drawn at `config.temperature` (0: the most
    likely token). Collective; all ranks return all samples.

    `limit`: maximum tokens of prompt and answer together; longer prompts than limit - 2 are left
    out. `tell(done, all)` reports this rank's share. Raises InvalidInput when no prompt is left.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(config.seed + rank)
    prompts = [prompt for sample in samples if 1 <= len(prompt := sample.prompt) <= limit - 2]
    if not prompts:
        raise InvalidInput(
            "no prompt can be answered",
            seen=f"{len(samples)} prompts",
            allowed=f"1 to {limit - 2} tokens",
        )

    # A batch is padded to its longest prompt, so similar lengths are batched together.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))[rank::world]
    own: list[tuple[int, list[int]]] = []
    for chunk in _batches(order):
        room = min(config.max_tokens, limit - max(len(prompts[i]) for i in chunk))
        for index, ids in zip(
            chunk, _generate(lm, [prompts[i] for i in chunk], room, config.temperature), strict=True
        ):
            own.append((index, ids))
        tell(len(own), len(order))

    answers = dict(pair for share in from_all_ranks(own) for pair in share)
    return [_joined(prompt, answers[i]) for i, prompt in enumerate(prompts)]


def answers_file(config: OfflineConfig, samples: Sequence[Example]) -> Path:
    """The file for the answers to these prompts under these settings."""
    drawn = (
        f"{config.model.resolve()} {config.max_tokens} {config.temperature} {config.seed} "
        f"{fingerprint(samples)}"
    )
    return config.out / f"answers-{hashlib.sha256(drawn.encode()).hexdigest()[:16]}.jsonl"


def write_answers(path: Path, samples: Sequence[Example]) -> None:
    """Writes samples as {"input_ids", "loss_mask"} records, atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for sample in samples:
            record = {
                "input_ids": sample.token_ids.tolist(),
                "loss_mask": sample.mask.astype(int).tolist(),
            }
            file.write(json.dumps(record) + "\n")
    temporary.rename(path)


def _batches(order: Sequence[int]) -> list[Sequence[int]]:
    return [order[i : i + BATCH] for i in range(0, len(order), BATCH)]


@torch.inference_mode()
def _generate(lm: Any, prompts: Sequence[Any], room: int, temperature: float) -> list[list[int]]:
    """Answers up to the end token, included."""
    from transformers import GenerationConfig

    ends = lm.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    seen = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        seen[row, width - len(prompt) :] = 1
    drawn: dict[str, Any] = {
        "do_sample": True,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
    }
    settings = GenerationConfig(
        max_new_tokens=room,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
        **(drawn if temperature > 0 else {"do_sample": False}),
    )
    out = lm.generate(input_ids=ids, attention_mask=seen, generation_config=settings)[
        :, width:
    ].tolist()
    return [
        row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]
        for row in out
    ]


def _joined(prompt: Any, answer: Sequence[int]) -> Example:
    ids = np.concatenate([prompt, np.array(answer, dtype=np.int64)])
    return Example(ids, np.arange(len(ids)) >= len(prompt))
