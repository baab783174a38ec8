"""The profile int8_w8a8 in SGLang: its conversion of a checkpoint, and the CPU product that SGLang
lacks.

Both equal the embedded engine's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.models.profiles import PROFILES
from paceline.models.quantised import quantised
from paceline.services.rollout_gateway.engines.sglang.plugin import rounded
from paceline.services.rollout_gateway.engines.sglang.plugin.rounded import (
    WholeNumbers,
    as_profile,
    loading,
)

pytest.importorskip("torchao")
DEMO = Path(__file__).parents[4] / "examples" / "demo"
PROFILE = PROFILES["int8_w8a8"]
CPU = torch.device("cpu")


def made(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(as_profile(tensors.items(), PROFILE, torch.bfloat16, CPU))


def test_matrices_of_the_layers_have_numbers_and_scales_and_nothing_else_is_touched() -> None:
    tensors = load_file(DEMO / "policy_trained" / "model.safetensors")
    found = made(tensors)
    matrices = {name for name in tensors if name.endswith("_proj.weight")}
    assert matrices
    assert found.keys() == tensors.keys() | {f"{name}_scale" for name in matrices}
    for name, one in tensors.items():
        if name not in matrices:
            assert found[name] is one
            continue
        expected = quantised(one.bfloat16(), PROFILE)
        scales = found[f"{name}_scale"]
        assert torch.equal(found[name], expected.values)
        assert (scales.dtype, scales.shape) == (torch.float32, (len(one), 1))
        assert torch.equal(scales[:, 0], expected.scales.float())


def test_a_checkpoint_that_is_stored_rounded_is_loaded_as_it_is() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    stored = {name: torch.ones(4, 8, dtype=torch.int8), f"{name}_scale": torch.ones(4, 1)}
    assert made(stored) == stored


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_the_embedded_engines_profile(bias: bool) -> None:
    torch.manual_seed(0)
    matrix = quantised(torch.randn(48, 32).bfloat16(), PROFILE)
    layer = nn.Module()
    layer.weight = nn.Parameter(matrix.values, requires_grad=False)
    layer.weight_scale = nn.Parameter(matrix.scales.float()[:, None], requires_grad=False)
    loaded = layer.weight
    method = WholeNumbers()
    method.process_weights_after_loading(layer)
    assert layer.weight is not loaded  # an update loads into the kept parameter
    x, shift = torch.randn(2, 3, 32).bfloat16(), torch.randn(48).bfloat16()
    expected = matrix.product(x.view(6, 32)).view(2, 3, 48)
    said = method.apply(layer, x, shift if bias else None)
    assert torch.equal(said, expected + shift if bias else expected)


def test_models_are_loaded_as_they_are_where_no_profile_or_no_layer_of_it_is() -> None:
    seen: list[object] = []

    def original(model: nn.Module, weights: object, device: torch.device) -> None:
        seen.append(weights)

    weights = [("model.layers.0.mlp.up_proj.weight", torch.ones(4, 8))]
    for profile in ("", "int8_w8a8"):
        plugin = SimpleNamespace(spec=SimpleNamespace(profile=profile, dtype="bfloat16"))
        loading(plugin, original, nn.Linear(2, 2), weights, CPU)
    assert [one is weights for one in seen] == [True, True]


def test_a_matrix_without_a_finite_scale_ends_an_update() -> None:
    model = nn.Module()
    model.load_weights = lambda pairs: None  # type: ignore[assignment]
    model.paceline_rounded = {"model.layers.0.mlp": {}}
    model.add_module(
        "model", nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": nn.Module()})])})
    )
    loadable = partial(as_profile, profile=PROFILE, dtype=torch.bfloat16, device=CPU)
    setattr(model, rounded.LOADABLE, loadable)
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.full((4, 8), 3.4e38)}
    model.model.layers[0]["mlp"].weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match="scales are not finite"):
        rounded.update(model, tensors)
