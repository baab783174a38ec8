"""One rank of the equality test: an optimiser step over four rows, its weights written by rank 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from drafter_trainer import sharing
from drafter_trainer.batcher import pack
from drafter_trainer.config import OptimizerConfig
from drafter_trainer.learner import DrafterLearner
from paceline.speculators.eagle import EagleNet

STUDENT = 1  # any that is not the default


def main(samples: Path, out: Path) -> None:
    """Steps once, however many ranks there are."""
    sys.path.insert(0, str(samples.parents[2]))
    from unit.drafter_trainer.samples import TARGET, sample, toy_policy

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, head = dist.get_world_size(), toy_policy().policy_head()
    config = OptimizerConfig(lr=1e-2, warmup_steps=0, clip_norm=1e9)
    learner = DrafterLearner(EagleNet(TARGET, seed=1), config, micro_batches=4 // world)
    loss = torch.zeros((), dtype=torch.float64)
    if dist.get_rank() == 0:
        rows = [pack([sample(9 + 3 * r + s, 4 * r + s) for s in range(4)], window=512) for r in range(4)]
        for first in range(0, 4, world):
            result = learner.micro_step(sharing.hand_out(rows[first : first + world], STUDENT), head)
            loss += result.loss * result.positions
        sharing.announce_snapshot()
        weights = learner.snapshot().state_dict()
        sharing.announce_stop()
    else:
        while (told := sharing.receive()) is not None:
            student, row = told
            if row is None:
                assert student == 0
                learner.snapshot()
                continue
            assert student == STUDENT
            assert row.lm_head_hash == head.hash
            result = learner.micro_step(row, head)
            loss += result.loss * result.positions
    dist.all_reduce(loss)
    state = learner.state()
    if dist.get_rank() == 0:
        moments = {f"exp_avg.{name}": s["exp_avg"] for name, s in state["optimizer"]["state"].items()}
        figures = torch.tensor([learner.total_steps, float(loss)], dtype=torch.float64)
        save_file({**weights, **moments, "figures": figures}, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    # Not a plain return: gloo's threads may still run while the interpreter is torn down, and abort the process.
    sys.stdout.flush()
    os._exit(0)
