"""Eight-bit matrices of every profile: the largest move of a weight, and its effect on products and
logits.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import FAMILIES, save_random
from torch.nn import functional

from paceline.errors import ConfigError, WeightsError
from paceline.models.cache import StaticCache
from paceline.models.config import read_config
from paceline.models.decoder import (
    DecoderWeights,
    forward_hidden,
    head_logits,
    make_block,
)
from paceline.models.in_place import ServedModel
from paceline.models.loading import read_tensors
from paceline.models.profiles import PROFILES, ROUNDED, Profile
from paceline.models.quantised import (
    EXACT_COLUMNS,
    FUSED_ROWS,
    GROUP,
    QuantisedMatrix,
    packed,
    quantised,
)

MATRICES = ("qkv", "output", "gate_up", "down")
INT8 = PROFILES["int8"]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao", reason="INT8 weights are rounded by torchao: the extra `int8`")


def stored(seed: int, rows: int, width: int, dtype: torch.dtype) -> QuantisedMatrix:
    """A random matrix of eight-bit numbers, made without torchao."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (rows, width), generator=generator, dtype=torch.int8)
    scales = torch.rand(rows, generator=generator) * 0.01 + 1e-4
    return QuantisedMatrix(values, scales.to(dtype), INT8)


def served(matrix: QuantisedMatrix) -> np.ndarray:
    """The matrix that is multiplied with, float64."""
    return np.asarray(matrix.values.double() * matrix.scales.double()[:, None])


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.integers(2, 70),
    st.floats(-6, 4),
)
def test_no_weight_moves_by_more_than_half_a_step_of_its_row(
    dtype: torch.dtype, seed: int, rows: int, width: int, magnitude: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (
        torch.randn(rows, width, generator=generator)
        * torch.rand(rows, 1, generator=generator)
        * 10**magnitude
    )
    weight = weight.to(dtype)
    matrix = quantised(weight, INT8)
    assert matrix.values.dtype == torch.int8
    assert matrix.scales.dtype == dtype
    step = matrix.scales.double().numpy()[:, None]
    moved = np.abs(served(matrix) - weight.double().numpy())
    # float32 divides weight by scale: the quotient, up to 127.5, is off by its last bit.
    assert (moved <= step * (0.5 + 128 * 2**-23)).all()
    # No step is wider than necessary: 255 steps span a row's weights, except that bfloat16 scales
    # round up.
    widest = 2 * np.abs(weight.double().numpy()).max(axis=1, keepdims=True) / 255
    assert (
        step
        <= np.maximum(widest * (1 + (2**-7 if dtype == torch.bfloat16 else 1e-6)), 1.2e-7 * 1.01)
    ).all()


@pytest.mark.usefixtures("torchao")
def test_numbers_are_those_of_torchaos_own_weight_only_quantisation() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = torch.nn.Linear(96, 64, bias=False)
    matrix = quantised(linear.weight.detach(), INT8)
    quantize_(torch.nn.Sequential(linear), Int8WeightOnlyConfig())
    np.testing.assert_allclose(
        served(matrix), linear.weight.dequantize().double().numpy(), rtol=1e-6
    )


@pytest.mark.usefixtures("torchao")
def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.tensor([[0.5, -0.25], [0.0, 0.0], [1.0, 0.125]])
    matrix = quantised(weight, INT8)
    assert served(matrix)[1].tolist() == [0.0, 0.0]
    assert np.isfinite(served(matrix)).all()
    assert (matrix.scales > 0).all()


@pytest.mark.parametrize("rows", [1, 2, FUSED_ROWS, FUSED_ROWS + 1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_that_of_the_numbers_stored(dtype: torch.dtype, rows: int) -> None:
    matrix = stored(1, 70, 96, dtype)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = x.double().numpy() @ served(matrix).T
    # bfloat16: the product and its scaling round to 8 bits each; both sum in float32.
    relative = 2**-7 if dtype == torch.bfloat16 else 0.0
    summed = 96 * 2**-24 * (x.double().abs().numpy() @ np.abs(served(matrix)).T)
    assert (
        np.abs(matrix.product(x).double().numpy() - exact) <= relative * np.abs(exact) + summed
    ).all()


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (50, 48), (1, 7), (2_000, 576)])
def test_a_matrix_in_four_bits_moves_by_half_a_step_of_its_group_and_bfloat16s_rounding(
    rows: int, columns: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    served = packed(weight).product(torch.eye(columns)).t()
    groups = functional.pad(weight, (0, -columns % GROUP)).unflatten(1, (-1, GROUP))
    reach = groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)
    most = (reach * (0.5 / 15 + 2**-7)).expand_as(groups).flatten(1)[:, :columns]
    assert served.shape == weight.shape
    assert ((served - weight).abs() <= most + weight.abs() * 2**-8).all()


def test_rows_of_the_fused_product_do_not_depend_on_their_neighbours() -> None:
    for width, out in ((48, 96), (128, 704), (96, 70)):
        matrix = stored(3, out, width, torch.bfloat16)
        x = torch.randn(FUSED_ROWS, width, generator=torch.Generator().manual_seed(4)).bfloat16()
        whole = matrix.product(x)
        for start in range(FUSED_ROWS):
            for end in range(start + 1, FUSED_ROWS + 1):
                assert torch.equal(matrix.product(x[start:end]), whole[start:end]), (
                    width,
                    out,
                    start,
                    end,
                )


def hidden_states(
    weights: DecoderWeights, ids: torch.Tensor, inner: tuple[int, ...] = ()
) -> torch.Tensor:
    batch, length = ids.shape
    cache = StaticCache(
        weights.config,
        layers=weights.config.num_layers,
        slots=batch,
        capacity=length,
        dtype=weights.head.dtype,
        device=ids.device,
    )
    positions = torch.arange(length).expand(batch, -1).contiguous()
    block = make_block(weights.config, weights.rotation, cache, slice(0, batch), positions, length)
    return forward_hidden(weights, cache, ids, block, inner)


def logits(weights: DecoderWeights, ids: torch.Tensor) -> torch.Tensor:
    return head_logits(weights, hidden_states(weights, ids)).float()


@pytest.mark.usefixtures("torchao")
def test_inner_states_are_what_the_layers_below_make_of_the_rounded_weights(
    tmp_path: Path,
) -> None:
    """The state that enters layer i is the last one of a model of i layers, but for the final
    norm.
    """
    save_random(tmp_path, "qwen3")
    config, tensors = read_config(tmp_path), read_tensors(tmp_path)
    eight = ServedModel(config, torch.float32, 32, INT8).build(tensors)
    ids = torch.randint(3, 97, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        rows = hidden_states(eight, ids, (1, 2)).split(config.hidden_size, dim=-1)
        for layers, state in zip((1, 2), rows, strict=False):
            below = hidden_states(replace(eight, layers=eight.layers[:layers]), ids)
            normed = (
                state
                * torch.rsqrt(state.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps)
                * eight.norm
            )
            torch.testing.assert_close(normed, below, atol=1e-5, rtol=1e-5)
        assert torch.equal(rows[-1], hidden_states(eight, ids))


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_near_those_of_the_whole_weights(family: str, tmp_path: Path) -> None:
    """One per cent of the logits' spread: weights move by 0.3 % of their row's largest at most."""
    save_random(tmp_path, family)
    config, tensors = read_config(tmp_path), read_tensors(tmp_path)
    plain = ServedModel(config, torch.float32, 32).build(tensors)
    eight = ServedModel(config, torch.float32, 32, INT8).build(tensors)
    ids = torch.randint(3, 97, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, seen = logits(plain, ids), logits(eight, ids)
    off = (seen - expected).pow(2).mean().sqrt() / expected.std()
    assert 0 < off < 0.03


@pytest.mark.usefixtures("torchao")
def test_embedding_norms_and_head_stay_as_they_are(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3")
    config, tensors = read_config(tmp_path), read_tensors(tmp_path)
    plain = ServedModel(config, torch.float32, 8).build(tensors)
    eight = ServedModel(config, torch.float32, 8, INT8).build(tensors)
    for name in ("embed", "norm", "head"):
        assert torch.equal(getattr(eight, name), getattr(plain, name))
    assert eight.head_hash == plain.head_hash
    for layer, whole in zip(eight.layers, plain.layers, strict=True):
        assert all(isinstance(getattr(layer, name), QuantisedMatrix) for name in MATRICES)
        assert layer.input_norm is not None
        assert whole.input_norm is not None
        assert torch.equal(layer.input_norm, whole.input_norm)
        assert torch.equal(layer.post_norm, whole.post_norm)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[int8\]'"):
        quantised(torch.ones(2, 2), INT8)


E4M3 = [PROFILES["fp8_channel"], PROFILES["fp8_tensor"]]


@pytest.mark.parametrize("profile", E4M3, ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 70), st.floats(-6, 4))
def test_no_weight_in_e4m3_moves_by_more_than_half_its_spacing(
    dtype: torch.dtype, profile: Profile, seed: int, rows: int, width: int, magnitude: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, width, generator=generator) * 10**magnitude).to(dtype)
    matrix = quantised(weight, profile)
    assert matrix.values.dtype == torch.float8_e4m3fn
    assert matrix.scales.shape == ((rows,) if profile.scale_per == "row" else (1,))
    exact, step = weight.double().numpy(), matrix.scales.double().numpy()[:, None]
    moved = np.abs(matrix.values.double().numpy() * step - exact)
    # Three bits behind the leading one; below 2^-6 numbers are 2^-9 apart. 2^-20: the division.
    assert (moved <= (np.abs(exact) * 2**-4 + step * 2**-10) * (1 + 2**-20)).all()
    largest = np.abs(exact).max(axis=1, keepdims=True) if len(step) > 1 else np.abs(exact).max()
    assert (step <= np.maximum(largest / 448 * (1 + 2**-7), 1.2e-7)).all()


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("profile", E4M3, ids=lambda one: one.name)
def test_scales_of_e4m3_are_torchaos(profile: Profile) -> None:
    from torchao.quantization.quant_primitives import _choose_scale_float8

    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    block = [1, 96] if profile.scale_per == "row" else [40, 96]
    wanted = _choose_scale_float8(weight, block)
    torch.testing.assert_close(
        quantised(weight, profile).scales, wanted.view(-1), rtol=1e-6, atol=0
    )


def test_every_number_of_e4m3_is_multiplied_as_it_is() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits[(bits & 127) != 127].view(torch.float8_e4m3fn)[:, None]  # but NaN
    matrix = QuantisedMatrix(values, torch.ones(1), PROFILES["fp8_tensor"])
    assert torch.equal(matrix.product(torch.ones(1, 1))[0], values[:, 0].float())


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("width", [96, EXACT_COLUMNS, 2500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_activations_are_multiplied_as_whole_numbers(
    dtype: torch.dtype, width: int, rows: int
) -> None:
    """Compare with int64: sums of up to 2500 products of eight bits do not fit into float32."""
    kept = stored(5, 70, width, dtype)
    matrix = replace(kept, profile=PROFILES["int8_w8a8"])
    x = (3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(6))).to(dtype)
    exact = x.double().numpy()
    step = np.float32(np.abs(exact).max(axis=1, keepdims=True)) / np.float32(127)
    whole = np.rint(np.float32(exact) / step).astype(np.int64)
    assert np.abs(whole).max() == 127
    sums = whole @ matrix.values.numpy().astype(np.int64).T
    wanted = sums * step.astype(np.float64) * matrix.scales.double().numpy()
    # Three roundings of float32 on the way, and the dtype of the result.
    relative = 2**-8 if dtype == torch.bfloat16 else 2**-22
    np.testing.assert_allclose(matrix.product(x).double().numpy(), wanted, rtol=relative)


def test_rows_of_rounded_activations_do_not_depend_on_their_neighbours() -> None:
    for dtype in DTYPES:
        kept = stored(3, 70, 96, dtype)
        matrix = replace(kept, profile=PROFILES["int8_w8a8"])
        x = torch.randn(40, 96, generator=torch.Generator().manual_seed(4)).to(dtype)
        whole = matrix.product(x)
        for start in range(0, 40, 7):
            assert torch.equal(matrix.product(x[start : start + 5]), whole[start : start + 5])


def test_activations_of_zeros_stay_zero() -> None:
    kept = stored(5, 70, 96, torch.float32)
    assert torch.equal(
        replace(kept, profile=PROFILES["int8_w8a8"]).product(torch.zeros(2, 96)), torch.zeros(2, 70)
    )


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", ROUNDED)
def test_a_few_rows_at_once_are_rounded_as_all_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(2))
    whole = quantised(weight, PROFILES[name])
    monkeypatch.setattr("paceline.models.quantised.ROUNDED_AT_ONCE", 1000)
    parts = quantised(weight, PROFILES[name])
    assert torch.equal(parts.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_scale_that_is_not_finite_is_refused_with_its_value(name: str, wrong: float) -> None:
    weight = torch.randn(8, 16)
    weight[3, 4] = wrong
    with pytest.raises(WeightsError, match=rf"scales? .*not finite; seen: ({wrong}|nan)"):
        quantised(weight, PROFILES[name])


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", ROUNDED)
def test_a_profile_keeps_its_numbers_as_the_table_says(name: str) -> None:
    profile = PROFILES[name]
    matrix = quantised(torch.randn(8, 16), profile)
    assert str(matrix.values.dtype) == f"torch.{profile.weight_dtype}"
    assert len(matrix.scales) == {"row": 8, "matrix": 1}[profile.scale_per]
    x = torch.randn(2, 16)
    rounds = not torch.allclose(matrix.product(x), x @ matrix.whole().T, rtol=1e-5, atol=1e-6)
    assert rounds == (name == "int8_w8a8")
