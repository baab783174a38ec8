"""The policy's weights in their trained, published and exported form.

Without adapters these are the same tensors. With adapters, only adapters are trained and written to
checkpoints. The published form is W + (alpha / rank) B A, which any engine serves. A push sends
that sum, or the adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError
from paceline.models.adapters import AddedAdapters, hash_of_start
from paceline.models.loading import DTYPES
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.adapters import ADAPTER, factors, write_adapters
from paceline.services.policy_trainer.learn.loading import StartWeights
from paceline.services.policy_trainer.learn.model import PolicyModel
from paceline.training.checkpoints import sharded_like
from paceline.training.process import from_rank_zero

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Tensors that the drafter trainer needs of every version; the second unless both are tied."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Names of the adapter beside one weight."""

    down: str
    up: str


class PolicyWeights:
    """Weights of a sharded policy, by the names of a Hugging Face directory."""

    def __init__(self, config: PolicyTrainerConfig, model: PolicyModel) -> None:
        self._model, self._settings = Path(config.model), config.adapters
        names = model.names()
        self._pairs = {
            names[weight]: _Pair(names[down], names[up])
            for weight, (down, up) in factors(model).items()
        }
        beside = {name for pair in self._pairs.values() for name in (pair.down, pair.up)}
        everything: dict[str, nn.Parameter] = {name: one for one, name in names.items()}
        self._whole = {k: v for k, v in sorted(everything.items()) if k not in beside}
        self.trained: Mapping[str, Tensor] = (
            {name: everything[name] for name in names.values() if name in beside}
            if beside
            else everything
        )
        """Trained parameters, sharded, in fp32."""
        self.added = self._added() if self._settings.publish == "adapters" and beside else None
        """The start weights to which pushed adapters are added; None: whole weights are pushed."""

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained instead of the weights."""
        return bool(self._pairs)

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the whole weights, sorted by name."""
        return {name: weight.shape for name, weight in self._whole.items()}

    @torch.no_grad()
    def published(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, sharded and in fp32, in the order of `shapes`; live tensors without
        adapters. Collective.
        """
        for name, weight in self._whole.items():
            pair = self._pairs.get(name)
            yield name, weight if pair is None else self._merged(weight, pair)

    def pushed(self) -> Iterator[tuple[str, Tensor]]:
        """The pushed tensors, sharded and in fp32, in the order of `pushed_shapes`: whole weights,
        or embedding, head and adapters. Collective.
        """
        return self.published() if self.added is None else iter(self._apart().items())

    def pushed_shapes(self) -> dict[str, torch.Size]:
        """Shapes of pushed tensors; adapters have the names that read_version expects."""
        return {
            name: one.shape for name, one in (self._apart() if self.added else self._whole).items()
        }

    def _apart(self) -> dict[str, Tensor]:
        heads = {name: one for name, one in self._whole.items() if name in (EMBEDDING, HEAD)}
        return heads | {
            name.replace(f".{ADAPTER}.", "."): one for name, one in sorted(self.trained.items())
        }

    def exported(
        self, trained: Iterable[tuple[str, Tensor]], directory: Path
    ) -> Iterator[tuple[str, Tensor]]:
        """The published form of whole `trained` tensors, in the order of `shapes`, without the
        ranks. Adapters are also written to `directory`/adapter.
        """
        if not self.adapted:
            yield from trained
            return
        found = dict(trained)  # small beside the model; only one whole tensor is in memory
        write_adapters(found, self._settings, self._model, directory / "adapter")
        start = StartWeights(self._model)
        for name, shape in self.shapes().items():
            weight, pair = start.read(name, shape), self._pairs.get(name)
            if pair is not None:
                weight.addmm_(found[pair.up], found[pair.down], alpha=self._settings.scale)
            yield name, weight

    def _added(self) -> AddedAdapters:
        stored = StartWeights(self._model).dtype(EMBEDDING)
        if stored not in DTYPES:
            raise ConfigError(
                "adapters cannot be pushed alone over a start policy in these numbers",
                seen=f"{stored} in {self._model}",
                allowed=f"{', '.join(DTYPES)}, or policy_trainer.adapters.publish=weights",
            )
        start = hash_of_start(self._model) if dist.get_rank() == 0 else ""
        return AddedAdapters(self._settings.scale, from_rank_zero(start), stored)

    def _merged(self, weight: nn.Parameter, pair: _Pair) -> Tensor:
        """Each rank computes its own rows: B is sharded as the weight, A is small and gathered."""
        down, up = self.trained[pair.down], self.trained[pair.up]
        assert isinstance(weight, DTensor)
        assert isinstance(down, DTensor)
        assert isinstance(up, DTensor)
        local = torch.addmm(
            weight.to_local(), up.to_local(), down.full_tensor(), alpha=self._settings.scale
        )
        return sharded_like(weight, local, weight.device_mesh)
