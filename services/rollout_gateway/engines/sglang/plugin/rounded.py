"""New weights for layers that SGLang rounds after it has loaded them (`quantization = "fp8"`), in
the storages that serve, so that captured CUDA graphs read them.

Rounding replaces a layer's parameters by others of another layout, which SGLang's loaders do not
know. Two records mend that (FlashRL; Liu et al. 2025): the parameters as they are loaded, kept
without memory, and those that serve. An update puts the first in the place of the second, lets
SGLang load and round as at its start, copies the result into the storages that serve and puts these
back; a decoder layer at a time, so that no more than one is there twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_RECORD = "paceline_rounded"
_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A parameter as SGLang loads it: with what its loaders read of it, and without memory."""

    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(parameter: nn.Parameter) -> Loaded:
        """As it is now."""
        return Loaded(parameter, parameter.shape, parameter.stride())

    def fill(self, device: torch.device) -> None:
        """Memory for numbers that come now."""
        self.parameter.data = torch.empty_strided(
            self.shape, self.stride, dtype=self.parameter.dtype, device=device
        )

    def drop(self) -> None:
        """Until the next update."""
        self.parameter.data = self.parameter.data.new_empty(0)


Record = dict[str, dict[str, Loaded]]
"""By module and parameter."""


def postprocessed(
    plugin: Any, original: Callable[..., None], model: nn.Module, target_device: torch.device
) -> None:
    """AROUND DefaultModelLoader.postprocess_weights: records what rounding replaces. An update has
    rounded already when SGLang's session ends.
    """
    if hasattr(model, _RECORD):
        return
    before = {
        name: {key: Loaded.of(one) for key, one in _parameters(module).items()}
        for name, module in _rounding(model)
    }
    original(model, target_device)
    record: Record = {}
    for name, module in _rounding(model):
        now = _parameters(module)  # those that serve as they were loaded are still there
        replaced = {k: one for k, one in before[name].items() if now.get(k) is not one.parameter}
        if replaced:
            record[name] = replaced
        for one in replaced.values():
            one.drop()
    if record:
        setattr(model, _RECORD, record)


def rounds(model: nn.Module) -> bool:
    """Whether SGLang replaced parameters after it had loaded them."""
    return hasattr(model, _RECORD)


def update(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Serves other numbers from the same storages: of a decoder layer all tensors or none.

    Raises RuntimeError where rounding came to another layout. An update that is interrupted leaves
    layers of both versions: the process has to end.
    """
    record: Record = getattr(model, _RECORD)
    modules = dict(model.named_modules())
    for layer, part in _by_layer(tensors).items():
        names = [name for name in record if _layer_of(f"{name}.") == layer]
        serving = {name: _parameters(modules[name]) for name in names}
        for name in names:
            device = next(iter(serving[name].values())).device
            for key, one in record[name].items():
                one.fill(device)
                modules[name]._parameters[key] = one.parameter
        model.load_weights(list(part.items()))
        for name in names:
            _round(name, modules[name], serving[name])
            for one in record[name].values():
                one.drop()


def _round(name: str, module: Any, serving: Mapping[str, nn.Parameter]) -> None:
    module.quant_method.process_weights_after_loading(module)
    rounded = _parameters(module)
    for key, served in serving.items():
        found = rounded[key]
        if found is served:
            continue
        if (found.shape, found.dtype) != (served.shape, served.dtype):
            raise RuntimeError(
                f"{name}.{key} is rounded to {found.dtype} {tuple(found.shape)}, and serves as "
                f"{served.dtype} {tuple(served.shape)}"
            )
        served.data.copy_(found.data)
        module._parameters[key] = served


def _rounding(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that SGLang processes after loading."""
    for name, module in model.named_modules():
        if getattr(module, "quant_method", None) is not None:
            yield name, module


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: one for key, one in module._parameters.items() if one is not None}


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors of each decoder layer, and under an empty name all others."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        parts.setdefault(_layer_of(name), {})[name] = one
    return parts


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""
