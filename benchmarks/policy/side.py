"""One side of the policy bench, a rank: takes steps on command and reports their time."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.policy.work import SPEC_VARIABLE, Work
from paceline.ranks.group import RankLink
from paceline.services.policy_trainer.algorithms.advantages import group_relative
from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh
from paceline.training.shards import load_causal_lm
from paceline.trajectory import Trajectory

BUDGETS = {"ours": 1536, "plain": 512}
"""Tokens of a forward, padding included: the fastest number for each side on 2 cores."""


def ours(
    model: Path, trajectories: list[Trajectory], tokens: int, *, row_tokens: int
) -> Callable[[], None]:
    """The learner's step on this rank; each step lays out its batch anew."""
    config = PolicyTrainerConfig(
        model=str(model), device="cpu", tokens_per_micro_batch=tokens, row_tokens=row_tokens
    )
    learner = build_learner(config, form_mesh(config))

    def step() -> None:
        learner.step(make_batch(trajectories, 0))

    return step


def plain(model: Path, trajectories: list[Trajectory], tokens: int) -> Callable[[], None]:
    """A common plain loop: sorted by length, padded, every logit, GRPO's loss, AdamW."""
    lm = load_causal_lm(model, torch.float32)
    lm.config.use_cache = False
    optimizer = AdamW(lm.parameters(), lr=1e-4)
    group_ids = list(dict.fromkeys(one.group_id for one in trajectories))
    advantages = group_relative(
        torch.tensor([one.reward or 0.0 for one in trajectories]),
        torch.tensor([group_ids.index(one.group_id) for one in trajectories]),
        torch.ones(len(trajectories)),
    ).tolist()
    order = sorted(range(len(trajectories)), key=lambda i: -len(trajectories[i].token_ids))
    trained = sum(one.trained_tokens for one in trajectories)

    def step() -> None:
        for chosen in _batches(order, trajectories, tokens):
            ids, mask, at = _padded([trajectories[i] for i in chosen])
            logits = lm(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logprobs - logprobs.detach()).exp()
            weights = torch.tensor([advantages[i] for i in chosen])[:, None] * at[:, 1:]
            (-(ratio * weights).sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _batches(order: list[int], trajectories: list[Trajectory], tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for i in order:
        longest = len(trajectories[batches[-1][0]].token_ids) if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _padded(chosen: list[Trajectory]) -> tuple[Tensor, Tensor, Tensor]:
    width = max(len(one.token_ids) for one in chosen)
    ids, mask, at = (torch.zeros(len(chosen), width, dtype=torch.int64) for _ in range(3))
    for row, one in enumerate(chosen):
        ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
        mask[row, : len(one.token_ids)] = 1
        at[row, : len(one.token_ids)] = torch.tensor(one.loss_mask)
    return ids, mask, at


def main() -> None:
    """Reports ready, then answers every message with seconds and peak memory of a step."""
    link = RankLink.from_environment()
    spec = json.loads(os.environ[SPEC_VARIABLE])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sides: dict[str, Callable[[Path, list[Trajectory], int], Callable[[], None]]] = {
        "ours": partial(ours, row_tokens=spec["row_tokens"]),
        "plain": plain,
    }
    tokens = spec["tokens"] or BUDGETS[spec["side"]]
    trajectories = Work(**spec["work"]).trajectories()
    step = sides[spec["side"]](Path(spec["model"]), trajectories, tokens)
    link.ready()
    with contextlib.closing(link):
        while True:
            if link.receive(3600.0) is None:
                continue
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            link.send(json.dumps({"seconds": seconds, "peak_mib": peak}).encode())


if __name__ == "__main__":
    main()
