"""Serves a policy in int8 inside SGLang: rounds its weights, and multiplies where SGLang cannot.

SGLang's method w8a8_int8 serves checkpoints that are stored rounded, with a scale for each row. It
rounds activations itself, with a scale per token. A run's versions arrive as they are trained. Each
matrix of a decoder layer is therefore rounded on its way to SGLang's loaders, as in the embedded
engine. Rounding precedes sharding, so the values do not depend on the ranks. On CUDA, and on CPUs
with AMX, SGLang's kernel computes the product (neither has been run). On other CPUs SGLang has no
kernel, and this module multiplies integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.loading import DTYPES
from paceline.models.profiles import PROFILES, Profile
from paceline.models.quantised import RoundedMatrix, quantised
from paceline.services.rollout_gateway.engines.sglang.plugin import rounded

Pairs = Iterable[tuple[str, Tensor]]
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
    layers: list[Any] = [one for one in model.modules() if _method_of(one) == _METHOD]
    if not spec.profile or not layers:
        original(model, weights, target_device)
        return
    rounding = partial(
        as_profile,
        profile=PROFILES[spec.profile],
        dtype=DTYPES[spec.dtype],
        device=torch.device(target_device),
    )
    rounded.take_as(model, rounding)
    if target_device.type == "cpu" and not _has_amx():
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
        matrix = RoundedMatrix(layer.weight, layer.weight_scale.view(-1))
        product = matrix.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return product if bias is None else product + bias


def _method_of(module: nn.Module) -> str:
    return type(getattr(module, "quant_method", None)).__name__


def _has_amx() -> bool:
    from sglang.srt.utils import cpu_has_amx_support

    return bool(cpu_has_amx_support())
