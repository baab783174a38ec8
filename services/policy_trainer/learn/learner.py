"""Takes optimiser steps on batches, and measures them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.training.optimizer import NamedAdamW
from paceline.training.process import on_device
from policy_trainer.algorithms import build_algorithm
from policy_trainer.algorithms.base import Algorithm, TokenBatch
from policy_trainer.batches.batch import MicroBatch, TrainBatch, make_micro_batch
from policy_trainer.batches.packing import plan_micro_batches
from policy_trainer.config import PolicyTrainerConfig
from policy_trainer.learn.model import PolicyModel
from policy_trainer.learn.parallel import gather_full, scatter_full
from policy_trainer.messages import StepFacts


class Learner:
    """Model and optimiser of this rank. All methods are collective."""

    def __init__(self, config: PolicyTrainerConfig, model: PolicyModel, mesh: DeviceMesh) -> None:
        self.config = config
        self.model = model
        self.mesh = mesh
        self.algorithm: Algorithm = build_algorithm(config.algorithm)
        self.updates = 0
        self.on_micro_batch: Callable[[int, int], None] = lambda number, of: None
        """Told of each micro-batch of this rank before it is trained on."""
        parameters = {n.removeprefix("lm."): p for n, p in model.named_parameters()}
        self.optimizer = NamedAdamW(parameters, config.optimizer)

    def step(self, batch: TrainBatch) -> StepFacts:
        """Updates the weights on the batch; leaves them as they are when no token carries gradient.

        The proximal log-probs are those of the first pass, detached: the weights have not moved
        yet, so this is exact and saves a forward. An update whose figures or gradient are not
        finite is taken on no rank.
        """
        started = time.perf_counter()
        trained = batch.trained_tokens
        if trained == 0:
            return StepFacts(train_s=time.perf_counter() - started, world_size=self.mesh.size())
        micro_batches = self._micro_batches(batch)
        proximal: list[Tensor] = []
        updates: list[tuple[Tensor, float]] = []
        for _ in range(self.config.algorithm.updates_per_step):
            sums = self._accumulate(micro_batches, proximal, trained)
            updates.append((sums, self._update(sums)))

        sums, norm = updates[0]
        loss, entropy, gap, clipped, grad_norm = (
            value if math.isfinite(value) else 0.0 for value in (*(sums / trained).tolist(), norm)
        )
        return StepFacts(
            loss,
            grad_norm,
            entropy,
            gap,
            clipped,
            train_s=time.perf_counter() - started,
            world_size=self.mesh.size(),
            skipped_updates=sum(not math.isfinite(norm) for _, norm in updates),
        )

    def _micro_batches(self, batch: TrainBatch) -> list[MicroBatch]:
        plan = plan_micro_batches(
            (batch.lengths - 1).tolist(),
            world_size=self.mesh.size(),
            row_tokens=self.config.row_tokens,
            tokens_per_micro_batch=self.config.tokens_per_micro_batch,
        )
        return [
            on_device(make_micro_batch(batch, rows), self.mesh.device_type)
            for rows in plan[self.mesh.get_rank()]
        ]

    def _accumulate(
        self, micro_batches: list[MicroBatch], proximal: list[Tensor], trained: int
    ) -> Tensor:
        """Gradients of the token-mean loss; returns global sums of loss, entropy, behavior gap,
        clipped tokens [4].

        Ranks average their gradients, so each rank's loss is scaled by the number of ranks: the
        result is the gradient of sum(loss) / global trained tokens whatever the number of ranks and
        the split.
        """
        self.optimizer.adamw.zero_grad()
        sums = torch.zeros(4, dtype=torch.float64, device=self.mesh.device_type)
        for i, micro in enumerate(micro_batches):
            self.on_micro_batch(i + 1, len(micro_batches))
            last = i == len(micro_batches) - 1
            # Until a sync every rank adds up whole gradients.
            self.model.set_requires_gradient_sync(last or self.config.reshard_after_forward)  # type: ignore[operator]
            policy, entropy = self.model(micro)
            if len(proximal) <= i:
                proximal.append(policy.detach())
            tokens = TokenBatch(policy, proximal[i], micro.behavior_logprobs, micro.advantages)
            loss = self.algorithm.loss(tokens)
            (loss.loss_sum * (self.mesh.size() / trained)).backward()
            gap = (proximal[i] - micro.behavior_logprobs).sum()
            sums += torch.stack([loss.loss_sum.detach(), entropy.sum(), gap, loss.clipped]).double()

        dist.all_reduce(sums)
        return sums.cpu()

    def _update(self, sums: Tensor) -> float:
        """Clips by the global norm, steps; returns the norm before clipping, NaN where a sum over
        all ranks is not finite.
        """
        if not sums.isfinite().all():
            return math.nan
        norm = self.optimizer.step(self.updates + 1)
        self.updates += math.isfinite(norm)
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Whole fp32 weights under their Hugging Face names; {} on other ranks than 0."""
        return gather_full(self.optimizer.parameters.items())

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Goes on from rank 0's whole weights, as `weights` returns them."""
        scatter_full(weights, self.optimizer.parameters.items())

    def state(self) -> dict[str, Any]:
        """Copies of this rank's shards on the CPU: "model" and "optimizer" by parameter."""
        on_cpu = self.mesh.device_type == "cpu"
        mesh = self.mesh if on_cpu else DeviceMesh.from_group(self.mesh.get_group(), "cpu")
        return {**self.optimizer.state(mesh), "updates": self.updates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state` of as many ranks."""
        self.optimizer.load_state(state)
        self.updates = state["updates"]
