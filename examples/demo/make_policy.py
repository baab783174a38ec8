"""Trains the demo's start policy from random weights on worked solutions, and measures it on the
held-out prompts.

The policy is meant to be half-trained: it knows three styles of answer about equally often, the one
without working is the weakest, and reinforcement learning has room to choose. Pairs of the train
split only.

Usage: python make_policy.py [--steps N] [--seed S] [--threads N] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
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
ROWS, ROW_TOKENS = 4, 256
PEAK_LR = 4e-3
LR_WARMUP_STEPS = 10
PROMPT_TOKENS = 7
LONGEST = PROMPT_TOKENS + 5 * gcd_chain.MAX_SUBTRACTIONS + 4
_IGNORED = -100


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
    """An endless seeded stream of documents `<bos>prompt response<eos>` as ids; styles evenly
    mixed.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._pairs = gcd_chain.pairs("train")
        # Drawn with replacement, so a flatter weight than the task files' gives the same mix of
        # answers.
        self._weights = [float(math.gcd(a, b)) for a, b in self._pairs]
        self._tokenizer = build_tokenizer()
        self._eos = vocabulary()["<eos>"]
        self._held: list[int] | None = None

    def batch(self, longest: int) -> Batch:
        """ROWS x ROW_TOKENS of whole documents, each at most `longest` tokens."""
        return _collate([self._row(longest) for _ in range(ROWS)])

    def _row(self, longest: int) -> list[list[int]]:
        documents: list[list[int]] = []
        room = ROW_TOKENS
        while True:
            document = self._held or self._document(longest)
            self._held = document if len(document) > room else None
            if self._held is not None:
                return documents
            documents.append(document)
            room -= len(document)

    def _document(self, longest: int) -> list[int]:
        style = self._rng.choice(gcd_chain.STYLES)
        while True:
            a, b = self._rng.choices(self._pairs, self._weights)[0]
            text = gcd_chain.prompt(a, b) + gcd_chain.solution(a, b, style)
            if len(text) + 2 <= longest:
                return [*self._tokenizer.encode(text).ids, self._eos]


def _collate(rows: list[list[list[int]]]) -> Batch:
    shape = (len(rows), ROW_TOKENS)
    ids = torch.full(shape, vocabulary()["<pad>"])
    labels, positions = torch.full(shape, _IGNORED), torch.zeros(shape, dtype=torch.long)
    document = torch.full(shape, -1)
    for row, documents in enumerate(rows):
        start = 0
        for index, tokens in enumerate(documents):
            end = start + len(tokens)
            ids[row, start:end] = torch.tensor(tokens)
            labels[row, start + PROMPT_TOKENS - 1 : end - 1] = torch.tensor(tokens[PROMPT_TOKENS:])
            positions[row, start:end] = torch.arange(len(tokens))
            document[row, start:end] = index
            start = end
    same = document[:, :, None] == document[:, None, :]
    causal = torch.ones(ROW_TOKENS, ROW_TOKENS, dtype=torch.bool).tril()
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


def longest_document(step: int, steps: int) -> int:
    """The curriculum: a quarter of the longest length until 10 % of the steps, all of it from 50 %
    on.
    """
    grown = min(1.0, max(0.0, (step / steps - 0.1) / 0.4))
    return round(LONGEST * (0.25 + 0.75 * grown))


def train(model: LlamaForCausalLM, steps: int, seed: int) -> Iterator[tuple[int, float, int]]:
    """Yields (step, loss, tokens so far) after every step."""
    corpus, optimizers, tokens = Corpus(seed), build_optimizers(model), 0
    model.train()
    for step in range(steps):
        batch = corpus.batch(longest_document(step, steps))
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
    parser = argparse.ArgumentParser(description="Train and measure the demo's start policy.")
    parser.add_argument("--steps", type=int, default=500, help="optimiser steps of 1,024 tokens")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument(
        "--out", type=Path, default=HERE / "policy_start", help="folder of the checkpoint"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = build_policy()
    began = time.perf_counter()
    for step, loss, tokens in train(model, options.steps, options.seed):
        if step % 20 == 0 or step == options.steps:
            print(
                f"step {step:4} loss {loss:.3f} tokens {tokens:7} seconds "
                f"{time.perf_counter() - began:.0f}",
                flush=True,
            )
    model.to(torch.bfloat16).save_pretrained(options.out)
    write_tokenizer(options.out)
    print(json.dumps(evaluate(options.out, HERE / "tasks_heldout.jsonl", seed=0, temperature=1.0)))


if __name__ == "__main__":
    main()
