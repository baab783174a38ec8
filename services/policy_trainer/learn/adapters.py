"""Low-rank adapters beside the policy's linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685), by
peft: y = W x + (alpha / rank) B A x. W stays fixed; A and B are trained.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.services.policy_trainer.batches.batch import MicroBatch
from paceline.services.policy_trainer.config import AdaptersConfig
from paceline.services.policy_trainer.learn.model import PolicyModel

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
        raise ConfigError(
            "adapters need peft: pip install 'paceline[lora]'",
            seen=f"policy_trainer.adapters.rank={settings.rank}",
            allowed="0 without it",
        )
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
            said: tuple[Tensor, Tensor] = self._policy[0](micro)
        return said


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
