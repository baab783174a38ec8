"""One rank of the equality tests: gradients and weights of the same steps, gathered and written by
rank 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from paceline.services.policy_trainer.algorithm_settings import CorrectionConfig, OwnConfig
from paceline.services.policy_trainer.algorithms.base import SessionBatch
from paceline.services.policy_trainer.algorithms.grpo import Grpo
from paceline.services.policy_trainer.batches.batch import TrainBatch, make_batch
from paceline.services.policy_trainer.batches.packing import mini_batches
from paceline.services.policy_trainer.config import PolicyOptimizerConfig, PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh, shard
from paceline.services.policy_trainer.learn.model import StartWeights, policy_on_meta
from paceline.services.policy_trainer.learn.objective import Figures
from paceline.training.process import tensors_from_rank_zero
from paceline.training.shards import local_of
from paceline.trajectory import BranchKey, Trajectory, VersionSpan


class Rewarded(Grpo):
    """The advantage of a token is its reward."""

    def advantages(self, batch: SessionBatch) -> torch.Tensor:
        """Whatever the group."""
        return batch.rewards[batch.owners]


REWARDED = OwnConfig(name=f"{__name__}:Rewarded")


def trajectories(count: int = 24, vocabulary: int = 61) -> list[Trajectory]:
    """Random token ids, lengths from 4 to 60, a third of each a prompt; rewards of the oracle."""
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
                version_spans=(VersionSpan(0, length // 2, 3), VersionSpan(length // 2, length, 4)),
                reward=-1.5 + 3.5 * i / (count - 1),
                seed=i,
                temperature=1.0 if i % 3 else 0.7,
            )
        )
    return made


def whole(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return copies of sharded tensors, gathered by torch on every rank."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one)
        .detach()
        .to("cpu", copy=True)
        .contiguous()
        for name, one in tensors
    }


def main(model: Path, out: Path, broken: int) -> None:
    """Steps once on the fixed batch; trajectory `broken` has a log-prob that is NaN, -1 for none."""
    capped = CorrectionConfig(weight="token")
    several = int(os.environ["WORLD_SIZE"]) > 1  # ranks save memory in every way, one in none
    config = PolicyTrainerConfig(
        model=str(model),
        device="cpu",
        reshard_after_forward=several,
        recompute_activations=several,
        algorithm=REWARDED.model_copy(update={"correction": capped}) if broken >= 0 else REWARDED,
        tokens_per_micro_batch=192,
        row_tokens=64,
        optimizer=PolicyOptimizerConfig(lr=1e-3, clip_norm=0.5),
    )
    mesh = form_mesh(config)
    learner = build_learner(config, mesh)
    policy = learner.model
    own = None
    if dist.get_rank() == 0:
        own = make_batch(trajectories(), 4)
        if broken >= 0:
            own.behavior_logprobs[own.owners == broken] = math.nan
    batch = tensors_from_rank_zero(TrainBatch, own)
    assert batch is not None
    figures = Figures()
    known, _ = learner._know(batch, figures)
    (part,) = mini_batches(batch, config)
    rounds: list[int] = []
    learner.on_micro_batch = lambda number, of: rounds.append(number)
    loss = learner._accumulate(batch, part, known, figures)
    gradients = whole((f"grad.{n}", p.grad) for n, p in policy.named_parameters())
    norm = learner._move(loss)
    found, _ = figures.reduced()
    weights = whole(policy.named_parameters())
    if dist.get_rank() == 0:
        numbers = [loss, found["entropy"], found.get("behavior_gap", math.nan), norm, len(rounds)]
        figures_of = torch.tensor(numbers, dtype=torch.float64)
        save_file({**gradients, **weights, "figures": figures_of}, out)
    dist.barrier()
    dist.destroy_process_group()


COMPARED = ("loss", "grad_norm", "entropy", "clip_fraction", "behavior_gap")
MODES: dict[str, dict[str, object]] = {
    "grpo": {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01},
    "gspo": {"mini_batches": 2, "passes": 2},
    "ppo": {"gae_lambda": 0.9},
    "decoupled": {"kl": {"coefficient": 0.1, "place": "reward"}},
    "reinforce_plus_plus": {"aggregation": "sequence_mean_token_mean"},
}
SAVING = {"compute_dtype": "bfloat16", "reshard_after_forward": True, "recompute_activations": True}
"""Every way of saving memory at once."""


def five_steps(
    model: Path,
    out: Path,
    *,
    modes: Sequence[str] = tuple(MODES),
    saving: bool = False,
    rank: int = 0,
) -> None:
    """Run five steps in these modes on batches that all ranks have; rank 0 writes weights and
    losses.
    """
    everything: dict[str, torch.Tensor] = {}
    mesh = None
    for name in modes:
        config = PolicyTrainerConfig.model_validate(
            {
                "model": str(model),
                "device": "cpu",
                "algorithm": {"name": name, **MODES[name]},
                "tokens_per_micro_batch": 192,
                "row_tokens": 64,
                "optimizer": {"lr": 1e-4},
                "adapters": {"rank": rank},
                **(SAVING if saving else {}),
            }
        )
        mesh = mesh or form_mesh(config)
        learner = build_learner(config, mesh)
        losses = []
        for step in range(5):
            rewards = torch.randn(24, generator=torch.Generator().manual_seed(step)).tolist()
            made = [replace(t, reward=r) for t, r in zip(trajectories(), rewards, strict=True)]
            facts = learner.step(make_batch(made, 4), step)
            losses += [facts.figures[one] for one in COMPARED]
        weights = whole(learner.weights.published())
        everything |= {f"{name}.{key}": value for key, value in weights.items()}
        everything[f"{name}.losses"] = torch.tensor(losses, dtype=torch.float64)
    if dist.get_rank() == 0:
        save_file(everything, out)
    dist.barrier()
    dist.destroy_process_group()


def loading(model: Path, out: Path) -> None:
    """Load the policy; rank 0 writes the numbers that it held at most and the numbers of its
    shards.
    """
    mesh = form_mesh(PolicyTrainerConfig(device="cpu"))
    config = PolicyTrainerConfig(model=str(model), device="cpu")
    policy = policy_on_meta(model)
    held: list[int] = []
    read = StartWeights.read

    def counting(self: StartWeights, name: str, shape: torch.Size) -> torch.Tensor:
        tensor = read(self, name, shape)
        here = [local_of(one) for one in policy.parameters() if not one.is_meta]
        held.append(sum(one.numel() for one in here) + tensor.numel())
        return tensor

    StartWeights.read = counting  # type: ignore[method-assign]
    shard(policy, mesh, config)
    shards = sum(local_of(one).numel() for one in policy.parameters())
    weights = whole((name, p) for p, name in policy.names().items())
    if dist.get_rank() == 0:
        save_file({**weights, "held": torch.tensor([max(held), shards])}, out)
    dist.barrier()
    dist.destroy_process_group()
