"""Matrices in eight bits: how far a weight may move, and what that does to products and logits."""

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

from paceline.errors import ConfigError
from paceline.models.cache import StaticCache
from paceline.models.config import read_config
from paceline.models.decoder import (
    DecoderWeights,
    Finish,
    finish_layer,
    forward_hidden,
    head_logits,
    make_block,
)
from paceline.models.int8 import FUSED_ROWS, Int8Matrix, quantized
from paceline.models.loading import build_weights, read_tensors

MATRICES = ("qkv", "output", "gate_up", "down")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao", reason="INT8 weights are rounded by torchao: the extra `int8`")


def stored(seed: int, rows: int, width: int, dtype: torch.dtype) -> Int8Matrix:
    """A random matrix of eight-bit numbers, made without torchao."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (rows, width), generator=generator, dtype=torch.int8)
    return Int8Matrix(values, (torch.rand(rows, generator=generator) * 0.01 + 1e-4).to(dtype))


def served(matrix: Int8Matrix) -> np.ndarray:
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
    matrix = quantized(weight)
    assert matrix.values.dtype == torch.int8
    assert matrix.scales.dtype == dtype
    step = matrix.scales.double().numpy()[:, None]
    moved = np.abs(served(matrix) - weight.double().numpy())
    # float32 divides weight by scale: the quotient, up to 127.5, is off by its last bit.
    assert (moved <= step * (0.5 + 128 * 2**-23)).all()
    # No step is wider than it has to be: 255 of them span a row's weights, but for what bfloat16
    # scales round up.
    widest = 2 * np.abs(weight.double().numpy()).max(axis=1, keepdims=True) / 255
    assert (
        step
        <= np.maximum(widest * (1 + (2**-7 if dtype == torch.bfloat16 else 1e-6)), 1.2e-7 * 1.01)
    ).all()


@pytest.mark.usefixtures("torchao")
def test_numbers_are_those_of_torchaos_own_weight_only_quantisation() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = torch.nn.Linear(96, 64, bias=False)
    matrix = quantized(linear.weight.detach())
    quantize_(torch.nn.Sequential(linear), Int8WeightOnlyConfig())
    np.testing.assert_allclose(
        served(matrix), linear.weight.dequantize().double().numpy(), rtol=1e-6
    )


@pytest.mark.usefixtures("torchao")
def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.tensor([[0.5, -0.25], [0.0, 0.0], [1.0, 0.125]])
    matrix = quantized(weight)
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
@pytest.mark.parametrize("finish", [None, finish_layer], ids=["inline", "replaced"])
def test_inner_states_are_what_the_layers_below_make_of_the_rounded_weights(
    finish: Finish | None, tmp_path: Path
) -> None:
    """The state that enters layer i is the last one of a model of i layers, but for the final
    norm.
    """
    save_random(tmp_path, "qwen3")
    config, tensors = read_config(tmp_path), read_tensors(tmp_path)
    eight = build_weights(config, tensors, dtype=torch.float32, positions=32, int8=True)
    eight = replace(eight, finish=finish)
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
    plain = build_weights(config, tensors, dtype=torch.float32, positions=32)
    eight = build_weights(config, tensors, dtype=torch.float32, positions=32, int8=True)
    ids = torch.randint(3, 97, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, seen = logits(plain, ids), logits(eight, ids)
    off = (seen - expected).pow(2).mean().sqrt() / expected.std()
    assert 0 < off < 0.03


@pytest.mark.usefixtures("torchao")
def test_embedding_norms_and_head_stay_as_they_are(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3")
    config, tensors = read_config(tmp_path), read_tensors(tmp_path)
    plain = build_weights(config, tensors, dtype=torch.float32, positions=8)
    eight = build_weights(config, tensors, dtype=torch.float32, positions=8, int8=True)
    for name in ("embed", "norm", "head"):
        assert torch.equal(getattr(eight, name), getattr(plain, name))
    assert eight.head_hash == plain.head_hash
    for layer, whole in zip(eight.layers, plain.layers, strict=True):
        assert all(isinstance(getattr(layer, name), Int8Matrix) for name in MATRICES)
        assert layer.input_norm is not None
        assert whole.input_norm is not None
        assert torch.equal(layer.input_norm, whole.input_norm)
        assert torch.equal(layer.post_norm, whole.post_norm)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[int8\]'"):
        quantized(torch.ones(2, 2))
