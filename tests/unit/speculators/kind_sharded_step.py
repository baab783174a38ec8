"""One rank of the equality test: an optimiser step of a kind over four rows, its weights written
by rank 0.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from unit.speculators import dflash_rows, eagle3_rows
from unit.speculators.eagle3_rows import document, packed
from whole_tensors import whole_of

from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.rows.sample import PolicyHead
from paceline.speculators.net import DraftNet
from paceline.speculators.packed import PackedRow

ROWS = 4
CONFIG = DrafterOptimizerConfig(kind="adamw", average=0, lr=1e-2, warmup_steps=0, clip_norm=1e9)


def drafter(kind: str) -> DraftNet:
    """Return the net to train."""
    if kind == "dflash":
        return dflash_rows.rough_net()
    return eagle3_rows.rough_net(draft_vocab_size=21, ttt_steps=3)


def step_rows() -> list[PackedRow]:
    """Return the training rows of one step, over all ranks."""
    return [
        packed([document(4 + row + part, 7 * row + part) for part in range(3)])
        for row in range(ROWS)
    ]


def main(kind: str, out: Path) -> None:
    """Steps once, however many ranks there are."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = drafter(kind)
    head = PolicyHead("", 0, net.embed, net.head)
    learner = DrafterLearner(net, CONFIG, micro_batches=ROWS)
    for row in step_rows()[rank::world]:
        learner.micro_step(row, head)
    learner.load_state(learner.state())
    weights = learner.snapshot().state_dict()
    moments = {
        key.replace("exp_avg/", "exp_avg."): whole_of(one)
        for key, one in learner.state().items()
        if key.startswith("exp_avg/")
    }
    if rank == 0:
        save_file({**weights, **moments}, out)
    dist.barrier()
    dist.destroy_process_group()
