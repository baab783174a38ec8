"""Keeps earlier versions of the trained weights on the CPU, to score tokens that they drew."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.services.policy_trainer.learn.device_memory import reshard


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
