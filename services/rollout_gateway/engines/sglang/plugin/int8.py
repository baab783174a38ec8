"""A policy in int8 inside SGLang: what a profile makes of a checkpoint's tensors on their way to
SGLang's own loaders, and the product where SGLang has none.

SGLang's method w8a8_int8 serves checkpoints that are stored rounded, with a scale for each row, and
rounds activations itself, with a scale per token. A run's versions come as they are trained: each
matrix of a decoder layer is rounded as the embedded engine rounds it, before it is sharded, so that
the numbers do not depend on the ranks. On CUDA, and on CPUs with AMX, the product is SGLang's
kernel (neither has been run); on other CPUs SGLang refuses, and whole numbers are multiplied here.
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
    """AROUND DefaultModelLoader.load_weights_only: what SGLang starts from is rounded, and so is
    every version that follows; a drafter is not.
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
    """Names and tensors as w8a8_int8 loads them: of a matrix [N, K] its numbers, int8 [N, K], and
    under its name and `_scale` the scales of its rows, float32 [N, 1]; all others as they are.

    Rounds what `dtype` keeps of a matrix, on `device`. Raises WeightsError for a scale that is not
    finite.
    """
    for name, one in weights:
        if _MATRIX.fullmatch(name) and one.is_floating_point():
            matrix = quantised(one.to(device=device, dtype=dtype), profile)
            yield name, matrix.values
            yield f"{name}_scale", matrix.scales.float()[:, None]
        else:
            yield name, one


class WholeNumbers:
    """Method of a layer on a CPU without AMX, for which SGLang has no kernel: the product of the
    embedded engine's profile, which adds whole numbers without rounding.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Other parameters than those that were loaded, as in SGLang's own method."""
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        layer.weight_scale = nn.Parameter(layer.weight_scale.data, requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., N] of activations x [..., K]."""
        matrix = RoundedMatrix(layer.weight, layer.weight_scale.view(-1))
        product = matrix.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return product if bias is None else product + bias


def _method_of(module: nn.Module) -> str:
    return type(getattr(module, "quant_method", None)).__name__


def _has_amx() -> bool:
    from sglang.srt.utils import cpu_has_amx_support

    return bool(cpu_has_amx_support())
