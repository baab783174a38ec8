"""One rank of an activation that waits for rows for longer than a collective may take."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from unit.drafter_trainer.samples import TARGET, toy_policy
from unit.drafter_trainer.test_trainer import ScriptedParent

from paceline.services.drafter_trainer import messages as m
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.gate.round import Candidates
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import on_cpu, receive
from paceline.services.drafter_trainer.rows.store import RowStore
from paceline.services.drafter_trainer.trainer import DrafterTrainer, TrainerLink
from paceline.speculators.eagle import EagleNet
from paceline.training.process import join_ranks


def main(directory: Path, collective_s: float) -> None:
    """Rank 0 runs an activation of three times the collectives' deadline, rank 1 follows it."""
    join_ranks("cpu", collective_s, threads=1, seed=0)
    members = on_cpu(2)
    settings = DrafterTrainerConfig()
    vars(settings).update(data_wait_s=3 * collective_s)  # a constant of a run
    rows = RowStore(settings.buffer, 0, batch_bytes=1 << 20)
    rows.add_head(toy_policy().policy_head())
    link = TrainerLink(ScriptedParent())  # type: ignore[arg-type]
    learner = DrafterLearner(
        EagleNet(TARGET, seed=1), settings.optimizer, micro_batches=4, members=members
    )
    trainer = DrafterTrainer(settings, learner, rows, link, Candidates(directory, TARGET))
    if dist.get_rank() == 0:
        stopped = trainer.run_activation(m.Activate(1, 0, 0, 0, slots=[0, 1]))
        assert stopped.reason == "no_data"
    else:
        words = []
        while not words or words[-1] != "stop":
            words.append(receive(members))
        assert set(words) == {"wait", "stop"}
    members.meet()
    dist.destroy_process_group()
