"""Moves a learner's models and moments off their device and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.training.offload import Offload
from paceline.training.optimizer import NamedOptimizer


class DeviceMemory:
    """A rank's tensors between steps: shards and moments. Gradients exist only within a step."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[NamedOptimizer]) -> None:
        self._models = models
        self._offload = Offload([*_parameters(models), *_moments(optimizers)])

    def leave(self) -> None:
        """Frees device memory until `enter`; the numbers stay on the CPU."""
        for model in self._models:
            reshard(model)
        self._offload.leave()

    def enter(self) -> None:
        """Undoes `leave`."""
        self._offload.come_back()

    def numbers(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or a moment, on either device; read only."""
        return self._offload.numbers(tensor)


def reshard(model: nn.Module) -> None:
    """Frees tensors gathered by a forward without backward; the next forward gathers again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _parameters(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()


def _moments(optimizers: Sequence[NamedOptimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for name in optimizer.parameters:
            yield from optimizer.moments(name).values()
