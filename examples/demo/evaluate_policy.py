"""Measures a demo checkpoint on the fixed held-out prompts: accuracy, the share of each style,
response lengths.

Samples with transformers and a key-value cache, in fp32, all prompts as one batch that shrinks as
responses end. Independent of the services on purpose: it is the yardstick for what they train.

Usage: python evaluate_policy.py [--model DIR] [--tasks FILE] [--temperature 1.0] [--seed 0]
[--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gcd_chain
import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, LlamaForCausalLM

from paceline.tasks import Task
from paceline.tasks.file import read_tasks

HERE = Path(__file__).parent
MAX_NEW_TOKENS = 380


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    token_ids: tuple[int, ...]
    """Generated ids, the final <eos> included when there is one."""
    text: str
    """The ids decoded without special tokens."""
    finished: bool
    """Whether it ended with <eos> rather than at the token limit."""


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    seed: int,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Response]:
    """Draws one response per prompt: argmax(logits / temperature + Gumbel noise).

    All prompts must have the same number of tokens, else ValueError. Temperature 0 is greedy.
    """
    encoded = [tokenizer.encode(text).ids for text in prompts]
    if len({len(ids) for ids in encoded}) != 1:
        raise ValueError(
            f"prompts must be of one length; saw {sorted({len(ids) for ids in encoded})} tokens"
        )
    eos = tokenizer.token_to_id("<eos>")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(len(encoded))
    inputs, cache = torch.tensor(encoded), DynamicCache(config=model.config)
    drawn: list[list[int]] = [[] for _ in encoded]
    for _ in range(max_new_tokens):
        logits = (
            model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[:, -1].float()
        )
        # Noise for every prompt, alive or not: a draw does not depend on the ends of other rows.
        noise = -torch.empty(len(encoded), logits.shape[-1]).exponential_(generator=generator).log()
        chosen = (logits / temperature + noise[rows] if temperature > 0 else logits).argmax(-1)
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            drawn[row].append(token)
        alive = (chosen != eos).nonzero().flatten()
        if not len(alive):
            break
        if len(alive) < len(rows):
            cache.batch_select_indices(alive)
        rows, inputs = rows[alive], chosen[alive, None]
    return [Response(tuple(ids), tokenizer.decode(ids), ids[-1] == eos) for ids in drawn]


def is_right(task: Task, response: Response) -> bool:
    """The demo's reward: ended by <eos>, and the text after `#` is the divisor."""
    return response.finished and gcd_chain.is_correct(response.text, task.answer)


def summarise(tasks: Sequence[Task], responses: Sequence[Response]) -> dict[str, float]:
    """Accuracy, style shares and accuracies, and the response length in tokens: median, 90th
    percentile, maximum.
    """
    right = [is_right(task, response) for task, response in zip(tasks, responses, strict=True)]
    lengths = sorted(len(response.token_ids) for response in responses)
    figures = {
        "prompts": float(len(tasks)),
        "accuracy": sum(right) / len(right),
        "length_median": float(lengths[len(lengths) // 2]),
        "length_p90": float(lengths[len(lengths) * 9 // 10]),
        "length_max": float(lengths[-1]),
        "length_mean": sum(lengths) / len(lengths),
    }
    for style in gcd_chain.STYLES:
        hits = [
            ok
            for ok, r in zip(right, responses, strict=True)
            if gcd_chain.style_of(r.text) == style
        ]
        figures[f"share_{style}"] = len(hits) / len(right)
        figures[f"accuracy_{style}"] = sum(hits) / max(1, len(hits))
    return {name: round(value, 4) for name, value in figures.items()}


def evaluate(model_dir: Path, tasks_file: Path, seed: int, temperature: float) -> dict[str, float]:
    """Loads a checkpoint in fp32 and summarises one response per task."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tasks = read_tasks(tasks_file)
    return summarise(
        tasks, sample(model, tokenizer, [task.prompt for task in tasks], seed, temperature)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure a demo checkpoint on the held-out prompts."
    )
    parser.add_argument(
        "--model", type=Path, default=HERE / "policy_start", help="checkpoint folder"
    )
    parser.add_argument(
        "--tasks", type=Path, default=HERE / "tasks_heldout.jsonl", help="JSONL of tasks"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines"
    )
    options = parser.parse_args()
    began = time.perf_counter()
    figures = evaluate(options.model, options.tasks, options.seed, options.temperature)
    figures["seconds"] = round(time.perf_counter() - began, 1)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
