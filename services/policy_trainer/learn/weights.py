"""The policy's weights in their trained, published and exported form, off their device, and of
earlier versions.

Without adapters these are the same tensors. With adapters, only adapters are trained and written to
checkpoints. The published form is W + (alpha / rank) B A, which any engine serves. A push sends
that sum, or the adapters.
"""

import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError
from paceline.models import adapters, loading
from paceline.services.policy_trainer.batches.batch import MicroBatch
from paceline.services.policy_trainer.config import AdaptersConfig, PolicyTrainerConfig
from paceline.services.policy_trainer.learn.model import PolicyModel, StartWeights
from paceline.training import checkpoints, process
from paceline.training.offload import Offload
from paceline.training.optimizer import NamedOptimizer
from paceline.training.shards import local_of

ADAPTER = "default"
"""peft's name for the only adapter of a module."""
_FILES = "base_model.model."
"""Prefix of names in a peft adapter file."""


def add_adapters(model: PolicyModel, settings: AdaptersConfig) -> None:
    """Adds adapters to the target layers of a model on meta. Afterwards only adapters carry
    gradient.

    Raises ConfigError if peft is not installed.
    """
    if find_spec("peft") is None:
        message = "adapters.rank needs peft: pip install 'paceline[lora]'"
        raise ConfigError(message, seen=settings.rank, allowed=0)
    from peft import inject_adapter_in_model  # takes seconds to import

    with torch.device("meta"):
        inject_adapter_in_model(_described(settings), model.lm)


def fill_adapters(
    unit: nn.Module, names: Mapping[nn.Parameter, str], device: str, seed: int
) -> None:
    """Allocates adapters of the unit that have no memory yet, on the device, with start numbers: A
    as torch starts a linear layer, and B zero, so the model starts unchanged.

    The numbers depend on seed and name only, so they are equal on every rank.
    """
    for layer in _adapted(unit):
        for side in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            if not side.weight.is_meta:
                continue
            fresh = torch.zeros(side.weight.shape)
            if side is layer.lora_A[ADAPTER]:
                own = zlib.crc32(f"{seed}/{names[side.weight]}".encode())
                draw = torch.Generator().manual_seed(own)
                nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=draw)
            side.weight = nn.Parameter(fresh.to(device))


def factors(model: PolicyModel) -> dict[nn.Parameter, tuple[nn.Parameter, nn.Parameter]]:
    """Current A [rank, in] and B [out, rank] of each weight [out, in] with adapters."""
    return {
        layer.base_layer.weight: (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
        for layer in _adapted(model)
    }


class StartPolicy(nn.Module):
    """The policy before its adapters learned, in the policy's own memory."""

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        self._policy = [policy]  # in a list, so its parameters do not become this module's

    def forward(self, micro: MicroBatch) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """As PolicyModel.forward."""
        with _silent(self._policy[0]):
            scores: tuple[Tensor, Tensor] = self._policy[0](micro)
        return scores


def write_adapters(
    trained: Mapping[str, Tensor], settings: AdaptersConfig, start: Path, directory: Path
) -> None:
    """Writes whole tensors under the names of Learner.state, as peft loads them beside the model of
    `start`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    described = _described(settings)
    described.base_model_name_or_path = str(start)
    described.save_pretrained(directory)
    tensors = {
        _FILES + name.replace(f".{ADAPTER}.", "."): tensor.contiguous()
        for name, tensor in trained.items()
    }
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})


def _described(settings: AdaptersConfig) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # multiplied as it is
        target_modules=list(settings.targets),
        lora_dropout=0.0,  # dropout in training would make the policy differ from the sampler
        task_type="CAUSAL_LM",
    )


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


@contextmanager
def _silent(model: nn.Module) -> Iterator[None]:
    layers = _adapted(model)
    before = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
            layer.scaling[ADAPTER] = scale


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Tensors that the drafter trainer needs of every version; the second unless both are tied."""


class PolicyWeights:
    """Weights of a sharded policy, by the names of a Hugging Face directory."""

    def __init__(self, config: PolicyTrainerConfig, model: PolicyModel) -> None:
        self._model, self._settings = Path(config.model), config.adapters
        names = model.names()
        # by weight: the names of its adapter's A and B
        self._pairs = {names[one]: (names[a], names[b]) for one, (a, b) in factors(model).items()}
        beside = {name for pair in self._pairs.values() for name in pair}
        everything: dict[str, nn.Parameter] = {name: one for one, name in names.items()}
        self.whole = {k: v for k, v in sorted(everything.items()) if k not in beside}
        """Parameters of the model without adapters, sharded, in fp32."""
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
        return {name: weight.shape for name, weight in self.whole.items()}

    @torch.no_grad()
    def published(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, sharded and in fp32, in the order of `shapes`; live tensors without
        adapters. Collective.
        """
        for name, weight in self.whole.items():
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
            name: one.shape for name, one in (self._apart() if self.added else self.whole).items()
        }

    def _apart(self) -> dict[str, Tensor]:
        heads = {name: one for name, one in self.whole.items() if name in (EMBEDDING, HEAD)}
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
                down, up = pair
                weight.addmm_(found[up], found[down], alpha=self._settings.scale)
            yield name, weight

    def _added(self) -> adapters.AddedAdapters:
        stored = StartWeights(self._model).dtype(EMBEDDING)
        if stored not in loading.DTYPES:
            message = "adapters cannot be pushed alone over a start policy in these numbers"
            allowed = f"{', '.join(loading.DTYPES)}, or policy_trainer.adapters.publish=weights"
            raise ConfigError(message, seen=f"{stored} in {self._model}", allowed=allowed)
        start = adapters.hash_of_start(self._model) if dist.get_rank() == 0 else ""
        return adapters.AddedAdapters(self._settings.scale, process.from_rank_zero(start), stored)

    def _merged(self, weight: nn.Parameter, pair: tuple[str, str]) -> Tensor:
        """Each rank computes its own rows: B is sharded as the weight, A is small and gathered."""
        down, up = (self.trained[name] for name in pair)
        assert isinstance(weight, DTensor)
        assert isinstance(down, DTensor)
        assert isinstance(up, DTensor)
        local = torch.addmm(
            weight.to_local(), up.to_local(), down.full_tensor(), alpha=self._settings.scale
        )
        return checkpoints.sharded_like(weight, local, weight.device_mesh)


class DeviceMemory(Offload):
    """A rank's tensors between steps: shards and moments. Gradients exist only within a step."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[NamedOptimizer]) -> None:
        self._models = models
        held: list[Iterable[Tensor]] = [model.parameters() for model in models]
        held += [optimizer.named().values() for optimizer in optimizers]
        super().__init__(chain.from_iterable(held))

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
        torch._foreach_copy_(memory, self._shards())

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
        torch._foreach_copy_(self._shards(), weights)

    def _shards(self) -> list[Tensor]:
        return [local_of(one).detach() for one in self._trained.values()]
