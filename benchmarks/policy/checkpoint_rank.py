"""A rank that takes steps on command, with or without a checkpoint that begins before the steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.policy.checkpoints import INTERVAL, WITH, Taken
from benchmarks.policy.side import BUDGETS
from benchmarks.policy.work import SPEC_VARIABLE, Work
from paceline.ranks.group import RankLink
from paceline.services.policy_trainer.batches.batch import TrainBatch, make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh
from paceline.services.policy_trainer.trainer import PolicyTrainer


def take(trainer: PolicyTrainer, batch: TrainBatch, *, saves: bool) -> Taken:
    """Takes INTERVAL steps; the time includes unfinished writing behind the steps."""
    began = time.perf_counter()
    if saves:
        trainer.begin_checkpoint()
    at = [time.perf_counter()]
    for _ in range(INTERVAL):
        trainer.learner.step(batch)
        at.append(time.perf_counter())
    trainer.settle()
    seconds = [after - before for before, after in itertools.pairwise(at)]
    return Taken(time.perf_counter() - began, at[0] - began if saves else 0.0, seconds)


def main() -> None:
    """Reports ready, then answers every message with figures of INTERVAL steps."""
    link = RankLink.from_environment()
    spec = json.loads(os.environ[SPEC_VARIABLE])
    config = PolicyTrainerConfig.model_validate(
        {
            "model": spec["model"],
            "device": "cpu",
            "tokens_per_micro_batch": BUDGETS["ours"],
            "run": {"dir": spec["dir"]},
        }
    )
    batch = make_batch(Work(**spec["work"]).trajectories(), 0)
    Path(spec["dir"]).mkdir(parents=True, exist_ok=True)
    trainer = PolicyTrainer(config, build_learner(config, form_mesh(config)), None)
    link.ready()
    with contextlib.closing(link):
        while True:
            if (told := link.receive(3600.0)) is not None:
                taken = take(trainer, batch, saves=told == WITH)
                link.send(json.dumps(asdict(taken)).encode())


if __name__ == "__main__":
    main()
