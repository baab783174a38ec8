"""Network, optimiser and the partial gradient between two optimiser steps. Owns no data, no lease."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from drafter_trainer.config import OptimizerConfig
from drafter_trainer.heads import PolicyHead
from paceline.speculators import DraftNet, PackedRow

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True)
class MicroResult:
    """One micro-batch."""

    loss: float  # mean over its positions
    positions: int
    seconds: float
    stepped: bool  # it completed an optimiser step
    terms: dict[str, float]  # means over its positions, see Objective.terms


class DrafterLearner:
    """A drafter sharded by FSDP2 over the ranks, stepped once per `micro_batches` micro-batches.

    Gradients are sums over positions until the step divides them by the positions of all ranks, so that a partial
    gradient can wait through a preemption and still weighs every position equally.
    """

    def __init__(self, net: DraftNet, config: OptimizerConfig, *, micro_batches: int) -> None:
        self._whole = net.twin()  # never sharded: what snapshots are copied from
        self._config, self._micro_batches = config, micro_batches
        self._world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (self._world,))
        for part in (*net.shards(), net):
            fully_shard(part, mesh=mesh)
        self._net = net
        self._optimizer = torch.optim.AdamW(
            self._net.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, foreach=True
        )
        self._pending_micro, self._pending_positions = 0, 0
        self.total_steps, self.total_tokens = 0, 0

    def micro_step(self, row: PackedRow, head: PolicyHead) -> MicroResult:
        """Adds one row's gradient; steps the optimiser when the batch is complete."""
        started = time.perf_counter()
        self._net.bind(head.embed_tokens, head.lm_head)
        loss, positions, terms = self._net(row)
        loss.backward()
        count = int(positions)
        self._pending_micro += 1
        self._pending_positions += count
        self.total_tokens += count
        stepped = self._pending_micro == self._micro_batches
        if stepped:
            self._optimizer_step()
        share = 1.0 / max(count, 1)
        means = {name: float(value) * share for name, value in terms.items()}
        return MicroResult(float(loss.detach()) * share, count, time.perf_counter() - started, stepped, means)

    def _optimizer_step(self) -> None:
        positions = torch.tensor(float(self._pending_positions))
        if self._world > 1:
            dist.all_reduce(positions)
        # FSDP2 averages gradients over ranks; sums are wanted.
        scale = self._world / max(float(positions), 1.0)
        parameters = list(self._net.parameters())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        torch.nn.utils.clip_grad_norm_(parameters, self._config.clip_norm)
        warm = min(1.0, (self.total_steps + 1) / max(self._config.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * warm
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.total_steps += 1
        self._pending_micro, self._pending_positions = 0, 0

    def snapshot(self) -> DraftNet:
        """A whole, unsharded copy of the drafter as it is now, on rank 0; a collective of all ranks."""
        tensors: dict[str, Any] = get_model_state_dict(self._net, options=_FULL)
        copy = self._whole.twin()
        if tensors:  # only rank 0 receives the full state
            copy.load_tensors(tensors)
        return copy.eval()

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to go on exactly, on the CPU; a collective of all ranks."""
        state = {
            "model": get_model_state_dict(self._net, options=_FULL),
            "optimizer": get_optimizer_state_dict(self._net, self._optimizer, options=_FULL),
        }
        return {
            # On one rank the tensors are the live ones.
            **tree_map_only(torch.Tensor, torch.clone, state),
            "total_steps": self.total_steps,
            "total_tokens": self.total_tokens,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`; a partial gradient is not part of it."""
        set_model_state_dict(self._net, state["model"], options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(
            self._net, self._optimizer, state["optimizer"], options=StateDictOptions(full_state_dict=True)
        )
        self.total_steps, self.total_tokens = state["total_steps"], state["total_tokens"]
