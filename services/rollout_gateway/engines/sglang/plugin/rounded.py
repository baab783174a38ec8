"""Loads new weights into layers that SGLang converts after loading, and serves a policy in int8.

Such layers occur with `quantization = "fp8"` and the profile int8_w8a8. Rounding replaces their
parameters by parameters of another layout, which SGLang's loaders cannot fill. Two records solve
this (FlashRL; Liu et al. 2025): the parameters in loading layout, kept without memory, and the
serving parameters. An update installs the loading layout and lets SGLang load and round as at its
start. It then copies the result into the serving storages, which captured CUDA graphs read, and
restores the serving parameters. It converts a decoder layer at a time, so at most one layer exists
twice.

SGLang's method w8a8_int8 serves checkpoints that are stored rounded, with a scale for each row. It
rounds activations itself, with a scale per token. A run's versions arrive as they are trained. Each
matrix of a decoder layer is therefore rounded on its way to SGLang's loaders, as in the embedded
engine. Rounding precedes sharding, so the values do not depend on the ranks. On CUDA, and on CPUs
with AMX, SGLang's kernel computes the product (neither has been run). On other CPUs SGLang has no
kernel, and this module multiplies integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import WeightsError
from paceline.models.loading import DTYPES
from paceline.models.profiles import PROFILES, Profile
from paceline.models.quantised import QuantisedMatrix, quantised

_RECORD = "paceline_rounded"
LOADABLE = "paceline_loadable"
"""Attribute of a model: a function from a version's tensors to the tensors that SGLang loads. It
may raise WeightsError.
"""
_LAYER = re.compile(r"model\.layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A parameter in loading layout, with the attributes that SGLang's loaders read.

    It has memory only during an update.
    """

    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]

    def fill(self, device: torch.device) -> None:
        """Allocate memory for the values of an update."""
        dtype = self.parameter.dtype
        self.parameter.data = torch.empty_strided(
            self.shape, self.stride, dtype=dtype, device=device
        )

    def drop(self) -> None:
        """Free the memory until the next update."""
        self.parameter.data = self.parameter.data.new_empty(0)


Record = dict[str, dict[str, Loaded]]
"""Parameters in loading layout, by module and parameter name."""
Pairs = Iterable[tuple[str, Tensor]]


def postprocessed(
    plugin: Any, original: Callable[..., None], model: nn.Module, target_device: torch.device
) -> None:
    """AROUND DefaultModelLoader.postprocess_weights: record the parameters that rounding replaces.

    Does nothing for a recorded model: an update has already rounded when SGLang's session ends.
    """
    if hasattr(model, _RECORD):
        return
    before = {
        name: {k: Loaded(one, one.shape, one.stride()) for k, one in _parameters(module).items()}
        for name, module in _rounding(model)
    }
    original(model, target_device)
    record: Record = {}
    for name, module in _rounding(model):
        now = _parameters(module)  # parameters that rounding leaves alone are still present
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
    """Load other values into the serving storages.

    tensors: for each decoder layer, all its tensors or none. Raises RuntimeError where rounding
    gives another layout. An interrupted update leaves layers of both
    versions, so the process must end.
    """
    record: Record = getattr(model, _RECORD)
    modules = dict(model.named_modules())
    as_loaded = getattr(model, LOADABLE, iter)
    for layer, part in _by_layer(tensors).items():
        own = {name: one for name, one in record.items() if _layer_of(f"{name}.") == layer}
        serving = {name: _parameters(modules[name]) for name in own}
        for name, loaded in own.items():
            device = next(iter(serving[name].values())).device
            for key, one in loaded.items():
                one.fill(device)
                modules[name]._parameters[key] = one.parameter
        try:
            model.load_weights(list(as_loaded(part.items())))
        except WeightsError as error:  # too late to reject: earlier layers have new weights
            raise RuntimeError(str(error)) from error
        for name, loaded in own.items():
            _round(name, modules[name], serving[name])
            for one in loaded.values():
                one.drop()


def _round(name: str, module: Any, serving: Mapping[str, nn.Parameter]) -> None:
    module.quant_method.process_weights_after_loading(module)
    rounded = _parameters(module)
    for key, served in serving.items():
        found = rounded[key]
        if found is served:
            continue
        if (found.shape, found.dtype) != (served.shape, served.dtype):
            forms = [f"{one.dtype} {tuple(one.shape)}" for one in (found, served)]
            raise RuntimeError(f"{name}.{key} is rounded to {forms[0]}, and serves as {forms[1]}")
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
    """Tensors of each decoder layer; tensors outside all layers are under the empty name."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, one in tensors.items():
        parts.setdefault(_layer_of(name), {})[name] = one
    return parts


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""


_MATRIX = re.compile(r"model\.layers\.\d+\..+_proj\.weight")
_METHOD = "W8A8Int8LinearMethod"


def loading(
    plugin: Any,
    original: Callable[..., None],
    model: nn.Module,
    weights: Pairs,
    target_device: torch.device,
) -> None:
    """AROUND DefaultModelLoader.load_weights_only: round the first policy and every later version.

    A drafter is not rounded.
    """
    spec = plugin.spec
    modules: list[Any] = [module for _, module in _rounding(model)]
    layers = [one for one in modules if type(one.quant_method).__name__ == _METHOD]
    if not spec.profile or not layers:
        original(model, weights, target_device)
        return
    kind, dtype, device = PROFILES[spec.profile], DTYPES[spec.dtype], torch.device(target_device)
    rounding = partial(as_profile, profile=kind, dtype=dtype, device=device)
    setattr(model, LOADABLE, rounding)
    from sglang.srt.utils import cpu_has_amx_support

    if target_device.type == "cpu" and not cpu_has_amx_support():
        for layer in layers:
            layer.quant_method = WholeNumbers()
    original(model, rounding(weights), target_device)


def as_profile(
    weights: Pairs, profile: Profile, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as w8a8_int8 loads them.

    A matrix [N, K] becomes int8 values [N, K], and float32 row scales [N, 1] under its name and
    `_scale`. All other tensors stay unchanged. A matrix is converted to `dtype` on `device` before
    it is rounded. Raises WeightsError for a scale that is not finite.
    """
    for name, one in weights:
        if _MATRIX.fullmatch(name) and one.is_floating_point():
            matrix = quantised(one.to(device=device, dtype=dtype), profile)
            yield name, matrix.values
            yield f"{name}_scale", matrix.scales.float()[:, None]
        else:
            yield name, one


class WholeNumbers:
    """Method of a layer on a CPU without AMX, for which SGLang has no kernel.

    It uses the product of the embedded engine's profile, which adds integers without rounding.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loaded parameters by new parameters, as SGLang's own method does."""
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        layer.weight_scale = nn.Parameter(layer.weight_scale.data, requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Product [..., N] of activations x [..., K]."""
        matrix = QuantisedMatrix(layer.weight, layer.weight_scale.view(-1), PROFILES["int8_w8a8"])
        product = matrix.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return product if bias is None else product + bias
