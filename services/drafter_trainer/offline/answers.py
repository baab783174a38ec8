"""Draws the model's own answers to the prompts of the data, as targets for drafters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import InvalidInput
from paceline.services.drafter_trainer.offline.config import OfflineConfig
from paceline.services.drafter_trainer.offline.data import Example, example, fingerprint
from paceline.training.process import from_all_ranks

BATCH = 16
"""Number of prompts that one rank answers at a time."""


def answer_prompts(
    lm: Any,
    samples: Sequence[Example],
    config: OfflineConfig,
    limit: int,
    told: Callable[[int, int], None],
) -> list[Example]:
    """One sample per prompt with the model's own answer, drawn at `config.temperature` (0: the most
    likely token). Collective; all ranks return all samples.

    `limit`: maximum tokens of prompt and answer together; longer prompts than limit - 2 are left
    out. `told(done, all)` reports this rank's share. Raises InvalidInput when no prompt is left.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(config.seed + rank)
    prompts = [p for one in samples if 1 <= len(p := one.prompt.tolist()) <= limit - 2]
    if not prompts:
        raise InvalidInput(
            "no prompt can be answered",
            seen=f"{len(samples)} prompts",
            allowed=f"1 to {limit - 2} tokens",
        )

    # A batch is padded to its longest prompt, so similar lengths are batched together.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))[rank::world]
    own: list[tuple[int, list[int]]] = []
    for begin in range(0, len(order), BATCH):
        chunk = order[begin : begin + BATCH]
        room = min(config.max_tokens, limit - max(len(prompts[i]) for i in chunk))
        answers = _generate(lm, [prompts[i] for i in chunk], room, config.temperature)
        own += zip(chunk, answers, strict=True)
        told(len(own), len(order))

    found = dict(pair for share in from_all_ranks(own) for pair in share)
    return [example([(prompt, False), (found[i], True)]) for i, prompt in enumerate(prompts)]


def answers_file(config: OfflineConfig, samples: Iterable[Example]) -> Path:
    """The file for the answers to these prompts under these settings."""
    drawn = (
        f"{config.model.resolve()} {config.max_tokens} {config.temperature} {config.seed} "
        f"{fingerprint(samples)}"
    )
    return config.out / f"answers-{hashlib.sha256(drawn.encode()).hexdigest()[:16]}.jsonl"


def write_answers(path: Path, samples: Iterable[Example]) -> None:
    """Writes samples as {"input_ids", "loss_mask"} records, atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for one in samples:
            ids, mask = one.token_ids.tolist(), one.mask.astype(int).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    temporary.rename(path)


@torch.inference_mode()
def _generate(
    lm: Any, prompts: Sequence[Sequence[int]], room: int, temperature: float
) -> list[list[int]]:
    """Answers up to the end token, included."""
    from transformers import GenerationConfig

    ends = set(lm.generation_config.eos_token_id or [])
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + [*one] for one in prompts])
    seen = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    settings = GenerationConfig(
        max_new_tokens=room,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
        do_sample=temperature > 0,
        **drawn,
    )
    out = lm.generate(input_ids=ids, attention_mask=seen, generation_config=settings)
    rows = out[:, width:].tolist()
    return [row[: next((i for i, t in enumerate(row, 1) if t in ends), len(row))] for row in rows]
