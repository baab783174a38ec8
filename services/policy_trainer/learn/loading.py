"""Loads the start policy unit by unit, so no rank ever holds all of it."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.errors import ConfigError, DataLoss, WeightsError
from paceline.models import loading, products

KERNELS = {"sdpa": "sdpa", "flex": "flex_attention", "flash": "flash_attention_2"}
"""transformers' names for the choices of `policy_trainer.attention`."""


def causal_lm_on_meta(directory: Path, attention: str = "sdpa") -> Any:
    """The transformers module of a directory in fp32, with parameters on meta.

    Raises ConfigError for a directory without a model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model can be loaded from {directory}: {error}", seen=directory
        ) from error
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=KERNELS[attention]
        )
    # The only buffers of these models. They are computed, not stored in a file.
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config=config)
    products.use_linear(lm)
    return lm


def check_attention(attention: str, device: str) -> None:
    """Raises ConfigError for a kernel that cannot train on the device, or is not installed."""
    seen, on_cuda = f"policy_trainer.attention={attention}", device == "cuda"
    if attention != "sdpa" and not on_cuda:
        raise ConfigError(f"this attention does not train on {device}", seen=seen, allowed="sdpa")
    if attention == "flash" and find_spec("flash_attn") is None:
        raise ConfigError(
            "flash attention is not installed: pip install flash-attn",
            seen=seen,
            allowed="sdpa or flex without it",
        )


class StartWeights:
    """The safetensors of a Hugging Face directory, read tensor by tensor."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidInput for a directory without weights, DataLoss for a damaged file."""
        self._directory = directory
        self._files: dict[str, Path] = {}
        for path in loading.weight_files(directory):
            try:
                with safe_open(path, framework="pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), path)
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error

    def fill(self, unit: nn.Module, names: Mapping[nn.Parameter, str], device: str) -> None:
        """Allocates parameters of the unit that have no memory yet, on the device, with the file's
        numbers. Tied parameters stay tied.

        `names`: their names in the files. Raises WeightsError for a tensor that is missing or has
        another shape.
        """
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for owner in unit.modules():
            for key, parameter in list(
                owner.named_parameters(recurse=False, remove_duplicate=False)
            ):
                if not parameter.is_meta:
                    continue
                if parameter not in filled:
                    whole = self.read(names[parameter], parameter.shape).to(device)
                    filled[parameter] = nn.Parameter(whole, parameter.requires_grad)
                owner.register_parameter(key, filled[parameter])

    def dtype(self, name: str) -> str:
        """torch's name for the stored dtype of a tensor; empty if it is absent."""
        if name not in self._files:
            return ""
        with safe_open(self._files[name], framework="pt") as opened:
            first: Tensor = opened.get_slice(name)[:1]
        return str(first.dtype).removeprefix("torch.")

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """One tensor in fp32. Raises as `fill` does."""
        path = self._files.get(name)
        if path is None:
            raise WeightsError(
                f"tensor {name} is missing", seen=self._directory, allowed=f"{tuple(shape)}"
            )
        try:
            with safe_open(path, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        if tensor.shape != shape:
            raise WeightsError(
                f"tensor {name} has a wrong shape", seen=tuple(tensor.shape), allowed=tuple(shape)
            )
        return tensor.to(torch.float32)


def _unreadable(path: Path, error: Exception) -> DataLoss:
    return DataLoss(f"cannot read {path}: {error}", allowed="a whole safetensors file")
