"""One rank of the equality test: gradients and weights of the same step, gathered and written by
rank 0.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from paceline.config import OptimizerConfig
from paceline.training.process import tensors_from_rank_zero
from paceline.trajectory import BranchKey, Trajectory
from policy_trainer.batches.batch import TrainBatch, make_batch
from policy_trainer.config import AlgorithmConfig, PolicyTrainerConfig
from policy_trainer.learn.learner import Learner
from policy_trainer.learn.model import load_policy
from policy_trainer.learn.parallel import form_mesh, gather_full, shard


def trajectories(count: int = 24, vocabulary: int = 61) -> list[Trajectory]:
    """Random token ids, lengths from 4 to 60, a third of each a prompt."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for i in range(count):
        length = int(torch.randint(4, 60, (1,), generator=draw))
        ids = torch.randint(0, vocabulary, (length,), generator=draw).tolist()
        mask = [0] * (length // 3) + [1] * (length - length // 3)
        made.append(
            Trajectory(
                key=BranchKey("r", f"s{i}"),
                step=0,
                task_id=f"t{i // 4}",
                group_id=f"g{i // 4}",
                group_size=4,
                task_index=i // 4,
                sample_index=i % 4,
                token_ids=tuple(ids),
                loss_mask=tuple(mask),
                behavior_logprobs=tuple(-1.0 * bit for bit in mask),
                version_spans=(),
                reward=float(torch.randint(0, 2, (1,), generator=draw)),
                seed=i,
                temperature=1.0 if i % 3 else 0.7,
            )
        )
    return made


def main(model: Path, out: Path, broken: int) -> None:
    """Steps once on the fixed batch; trajectory `broken` has a log-prob that is NaN, -1 for none."""
    several = int(os.environ["WORLD_SIZE"]) > 1  # ranks save memory in every way, one in none
    config = PolicyTrainerConfig(
        device="cpu",
        reshard_after_forward=several,
        recompute_activations=several,
        algorithm=AlgorithmConfig(behavior_cap=2.0 if broken >= 0 else 0.0),
        tokens_per_micro_batch=192,
        row_tokens=64,
        optimizer=OptimizerConfig(lr=1e-3, clip_norm=0.5),
    )
    mesh = form_mesh(config)
    start = load_policy(model, recompute=config.recompute_activations)
    policy = shard(start, mesh, reshard_after_forward=config.reshard_after_forward)
    learner = Learner(config, policy, mesh)
    own = None
    if dist.get_rank() == 0:
        own = make_batch(trajectories(), torch.linspace(-1.5, 2.0, 24))
        if broken >= 0:
            own.behavior_logprobs[int(own.lengths[: broken + 1].sum()) - 1] = math.nan
    batch = tensors_from_rank_zero(TrainBatch, own)
    assert batch is not None
    micro_batches = learner._micro_batches(batch)
    sums = learner._accumulate(micro_batches, [], batch.trained_tokens)
    gradients = gather_full((f"grad.{n}", p.grad) for n, p in policy.named_parameters())
    norm = learner._update(sums)
    weights = gather_full(policy.named_parameters())
    if dist.get_rank() == 0:
        figures = torch.tensor(
            [*sums.tolist(), norm, float(len(micro_batches))], dtype=torch.float64
        )
        save_file({**gradients, **weights, "figures": figures}, out)
    dist.barrier()
    dist.destroy_process_group()
