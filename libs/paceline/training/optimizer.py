"""Optimises named parameters with AdamW, or their matrices with Muon if requested: warm-up,
clipping and named state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from paceline.config import OptimizerConfig
from paceline.training.checkpoints import copy_local, copy_on_cpu
from paceline.training.muon import Muon
from paceline.training.quantised_adamw import quantised_adamw
from paceline.training.shards import local_of

MOMENTS = ("exp_avg", "exp_avg_sq")
_EPS = 1e-8  # added to the root of the second moment; torch's default


class NamedOptimizer:
    """AdamW, or Muon and AdamW, over parameters by name, whole or sharded.

    Moments start at zero, so the state has its final shape before the first step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: OptimizerConfig,
        *,
        moments: Literal["float32", "int8"] = "float32",
        matrices: Collection[str] = (),
        iterations: int = 0,
    ) -> None:
        """`matrices`: parameters that Muon moves, with their number of iterations. Raises
        ConfigError if int8 moments lack torchao.
        """
        self.parameters = dict(parameters)
        self._config = config
        rest = [one for name, one in self.parameters.items() if name not in matrices]
        self._parts: list[Optimizer] = [_adamw(rest, config, moments)] if rest else []
        if matrices:
            muon = Muon(
                [self.parameters[name] for name in matrices],
                lr=config.lr,
                momentum=config.betas[0],
                weight_decay=config.weight_decay,
                iterations=iterations,
            )
            self._parts.append(muon)

    def moments(self, name: str) -> dict[str, Tensor]:
        """Moments of one parameter, live; AdamW's include its step."""
        parameter = self.parameters[name]
        (found,) = (part.state[parameter] for part in self._parts if parameter in part.state)
        return found

    @property
    def rates(self) -> list[float]:
        """Learning rates of the last step."""
        return [float(group["lr"]) for group in self._groups()]

    def forget(self) -> None:
        """Drops the gradients."""
        for part in self._parts:
            part.zero_grad()

    def _groups(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield from part.param_groups

    def step(self, number: int) -> float:
        """Takes step `number`, counted from 1, and drops the gradients.

        lr_t = lr * min(1, t / warmup_steps). Returns the global gradient norm before clipping,
        equal on all ranks. A step with a non-finite norm is not taken.
        """
        found = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._config.clip_norm)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        if math.isfinite(norm):
            warm = min(1.0, number / max(self._config.warmup_steps, 1))
            for group in self._groups():
                rate = self._config.lr * warm
                group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate
            for part in self._parts:
                part.step()
        self.forget()
        return norm

    def state(
        self,
        mesh: DeviceMesh | None,
        into: Mapping[str, Any] | None = None,
        numbers: Callable[[Tensor], Tensor] = local_of,
    ) -> dict[str, Any]:
        """Copies of this rank's shards in fp32 on the CPU, over `mesh`: "model" and "optimizer" by
        parameter.

        `into`: an earlier state of these parameters, which is overwritten. `numbers`: returns the
        values of a shard (Offload.numbers).
        """
        model: Mapping[str, Tensor] = into["model"] if into else {}
        optimizer: Mapping[str, Mapping[str, Tensor]] = into["optimizer"] if into else {}
        return {
            "model": {
                name: copy_on_cpu(value, mesh, model.get(name), numbers)
                for name, value in self.parameters.items()
            },
            "optimizer": {
                name: {
                    key: copy_on_cpu(value, mesh, optimizer.get(name, {}).get(key), numbers)
                    for key, value in self.moments(name).items()
                }
                for name in self.parameters
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state` of the same number of ranks."""
        for name, parameter in self.parameters.items():
            copy_local(state["model"][name], parameter)
            for key, value in self.moments(name).items():
                copy_local(state["optimizer"][name][key], value)


def _adamw(
    parameters: list[Tensor], config: OptimizerConfig, moments: Literal["float32", "int8"]
) -> Optimizer:
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": _EPS,
        "weight_decay": config.weight_decay,
    }
    if moments == "int8":
        return quantised_adamw(parameters, settings, MOMENTS)
    made = AdamW(parameters, **settings, fused=True)
    for parameter in parameters:
        fresh = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        # The fused kernel counts steps on the device of the parameter, other kernels on the CPU.
        made.state[parameter] = {"step": torch.zeros((), device=parameter.device), **fresh}
    return made
