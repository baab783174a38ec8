"""Moves models and moments off their device and back, and keeps earlier weights on the CPU."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.training.offload import Offload
from paceline.training.optimizer import NamedOptimizer


class DeviceMemory(Offload):
    """A rank's tensors between steps: shards and moments. Gradients exist only within a step."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[NamedOptimizer]) -> None:
        self._models = models
        super().__init__([*_parameters(models), *_moments(optimizers)])

    def leave(self) -> None:
        """Frees device memory until `enter`; the numbers stay on the CPU."""
        for model in self._models:
            reshard(model)
        super().leave()


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


class KeptWeights:
    """This rank's shards of the last versions; empty after a restart."""

    def __init__(self, model: nn.Module, trained: Mapping[str, Tensor], versions: int) -> None:
        """`trained`: parameters of the model. `versions`: largest number of kept versions."""
        self._model = model
        self._trained = trained
        self.limit = versions
        self._kept: deque[list[Tensor]] = deque(maxlen=versions)

    @property
    def versions(self) -> int:
        """Number of kept versions."""
        return len(self._kept)

    def keep(self) -> None:
        """Keeps the current weights as the newest version, in the memory of the oldest."""
        if not self.limit:
            return
        if len(self._kept) < self.limit:
            memory = [torch.empty_like(one, device="cpu") for one in self._shards()]
        else:
            memory = self._kept[0]
        self._kept.append(memory)  # replaces the oldest
        _copy(self._shards(), memory)

    @contextmanager
    def as_of(self, lag: int) -> Iterator[None]:
        """Within the block, the model has the weights of the lag-th last kept version."""
        now = [one.detach().clone() for one in self._shards()]
        self._serve(self._kept[-lag])
        try:
            yield
        finally:
            self._serve(now)

    def _serve(self, weights: list[Tensor]) -> None:
        reshard(self._model)
        _copy(weights, self._shards())

    def _shards(self) -> list[Tensor]:
        return [
            one.to_local() if isinstance(one, DTensor) else one for one in self._trained.values()
        ]


@torch.no_grad()
def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
