"""Trains a start policy from random weights on worked solutions, and measures it on the held-out
prompts. Pairs of the train split only.

With three digits the policy first learns to work by subtraction and by remainders. Then it learns
to answer by subtraction hardly ever. Reinforcement learning that rewards subtraction therefore
moves the policy, and the best drafter, far from the start. With two digits the policy uses three
styles about equally often; the style without working is the weakest.

Usage: python make_policy.py [--family NAME] [--steps N] [--seed S] [--threads N] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gcd_chain
import torch
from evaluate_policy import evaluate
from make_tokenizer import CONTEXT_TOKENS, build_tokenizer, vocabulary, write_tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
PEAK_LR = 4e-3
LR_WARMUP_STEPS = 10
_IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """Training data and schedule of a start policy."""

    family: gcd_chain.Family
    steps: int
    rows: int
    row_tokens: int
    shares: tuple[float, float, float]
    """Of documents in each of gcd_chain.STYLES."""
    last_shares: tuple[float, float, float]
    """Share of worked solutions by subtraction in the last fifth of the steps."""


EVEN = (1 / 3, 1 / 3, 1 / 3)
RECIPES = {
    "three-digits": Recipe(
        gcd_chain.THREE_DIGITS, 1200, 3, 384, (0.10, 0.45, 0.45), (0.40, 0.57, 0.03)
    ),
    "two-digits": Recipe(gcd_chain.TWO_DIGITS, 500, 4, 256, EVEN, EVEN),
}


@dataclass(frozen=True)
class Batch:
    """Packed documents; a token sees only earlier tokens of its own document."""

    input_ids: Tensor
    """int64 [B, T]"""
    labels: Tensor
    """int64 [B, T]: the next token where it belongs to a response, else -100."""
    position_ids: Tensor
    """int64 [B, T]: position within the document."""
    mask: Tensor
    """bool [B, 1, T, T]: True where row position i may see j."""
    tokens: int
    """Tokens that are not padding."""


class Corpus:
    """An endless seeded stream of documents `<bos>prompt response<eos>` as ids."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self._recipe = recipe
        self._rng = random.Random(seed)
        # Drawn with replacement, so a flatter weight than the task files' gives the same mix of
        # answers.
        self._draws = gcd_chain.Draws(recipe.family, exponent=1.0)
        self._tokenizer = build_tokenizer()
        self._eos = vocabulary()["<eos>"]
        self._held: list[int] | None = None

    def batch(self, longest: int, *, last: bool) -> Batch:
        """Rows of whole documents, each at most `longest` tokens. last: with the last shares."""
        recipe = self._recipe
        shares = recipe.last_shares if last else recipe.shares
        return _collate(recipe, [self._row(longest, shares) for _ in range(recipe.rows)])

    def _row(self, longest: int, shares: Sequence[float]) -> list[list[int]]:
        documents: list[list[int]] = []
        room = self._recipe.row_tokens
        while True:
            document = self._held or self._document(longest, shares)
            self._held = document if len(document) > room else None
            if self._held is not None:
                return documents
            documents.append(document)
            room -= len(document)

    def _document(self, longest: int, shares: Sequence[float]) -> list[int]:
        family = self._recipe.family
        (style,) = self._rng.choices(gcd_chain.STYLES, shares)
        while True:
            a, b = self._draws.draw(self._rng)
            text = family.prompt(a, b) + family.solution(a, b, style)
            if len(text) + 2 <= longest:
                return [*self._tokenizer.encode(text).ids, self._eos]


def _collate(recipe: Recipe, rows: list[list[list[int]]]) -> Batch:
    width, prompt = recipe.row_tokens, recipe.family.prompt_tokens
    shape = (len(rows), width)
    ids = torch.full(shape, vocabulary()["<pad>"])
    labels, positions = torch.full(shape, _IGNORED), torch.zeros(shape, dtype=torch.long)
    document = torch.full(shape, -1)
    for row, documents in enumerate(rows):
        start = 0
        for index, tokens in enumerate(documents):
            end = start + len(tokens)
            ids[row, start:end] = torch.tensor(tokens)
            labels[row, start + prompt - 1 : end - 1] = torch.tensor(tokens[prompt:])
            positions[row, start:end] = torch.arange(len(tokens))
            document[row, start:end] = index
            start = end
    same = document[:, :, None] == document[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return Batch(
        ids, labels, positions, (same & causal)[:, None], sum(len(d) for r in rows for d in r)
    )


def build_policy() -> LlamaForCausalLM:
    """2.3M parameters, deep and narrow: a drafter of one layer is cheap beside twelve."""
    ids = vocabulary()
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=ids["<bos>"],
        eos_token_id=ids["<eos>"],
        pad_token_id=ids["<pad>"],
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the blocks, AdamW on embedding, head and norms; one learning rate for
    both.
    """
    blocks = {id(p) for p in model.model.layers.parameters() if p.ndim == 2}
    matrices = [p for p in model.parameters() if id(p) in blocks]
    others = [p for p in model.parameters() if id(p) not in blocks]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(step: int, steps: int) -> float:
    """A short ramp, constant to the middle, then linear to zero at the end."""
    return PEAK_LR * min(1.0, (step + 1) / LR_WARMUP_STEPS, 2.0 * (1.0 - step / steps))


def longest_document(step: int, recipe: Recipe, steps: int) -> int:
    """The curriculum: a quarter of the longest length until 10 % of the steps, all of it from 50 %
    on.
    """
    grown = min(1.0, max(0.0, (step / steps - 0.1) / 0.4))
    return round(recipe.family.longest * (0.25 + 0.75 * grown))


def train(
    model: LlamaForCausalLM, recipe: Recipe, steps: int, seed: int
) -> Iterator[tuple[int, float, int]]:
    """Yields (step, loss, tokens so far) after every step."""
    corpus, optimizers, tokens = Corpus(recipe, seed), build_optimizers(model), 0
    model.train()
    for step in range(steps):
        longest = longest_document(step, recipe, steps)
        batch = corpus.batch(longest, last=step >= 0.8 * steps)
        hidden = model.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.mask,
            use_cache=False,
        ).last_hidden_state
        loss = functional.cross_entropy(
            model.lm_head(hidden).flatten(0, 1), batch.labels.flatten(), ignore_index=_IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        tokens += batch.tokens
        yield step + 1, loss.item(), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and measure a start policy.")
    parser.add_argument("--family", choices=RECIPES, default="three-digits")
    parser.add_argument("--steps", type=int, default=0, help="optimiser steps; 0: the recipe's")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument(
        "--out", type=Path, default=HERE / "policy_start", help="folder of the checkpoint"
    )
    parser.add_argument(
        "--tasks", type=Path, default=HERE / "tasks_heldout.jsonl", help="to measure it on"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    recipe = RECIPES[options.family]
    steps = options.steps or recipe.steps
    model = build_policy()
    began = time.perf_counter()
    for step, loss, tokens in train(model, recipe, steps, options.seed):
        if step % 20 == 0 or step == steps:
            print(
                f"step {step:4} loss {loss:.3f} tokens {tokens:7} seconds "
                f"{time.perf_counter() - began:.0f}",
                flush=True,
            )
    model.to(torch.bfloat16).save_pretrained(options.out)
    write_tokenizer(options.out)
    print(json.dumps(evaluate(options.out, options.tasks, seed=0, temperature=1.0)))


if __name__ == "__main__":
    main()
