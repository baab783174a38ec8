"""Profiles on a GPU: its own kernels compute the CPU's products, and a captured graph uses the
numbers of the newest version.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_models import save_random

from paceline.models.config import read_config
from paceline.models.decoder import project
from paceline.models.in_place import ServedModel, serve_staged
from paceline.models.profiles import PROFILES, ROUNDED
from paceline.models.quantised import E4M3_LARGEST, QuantisedMatrix, quantised

pytestmark = pytest.mark.gpu
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CUDA = torch.device("cuda")


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("name", ROUNDED)
def test_products_are_those_of_the_cpu(name: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 128, generator=generator)
    x = torch.randn(rows, 128, generator=generator)
    matrix = quantised(weight, PROFILES[name])
    there = QuantisedMatrix(matrix.values.to(CUDA), matrix.scales.to(CUDA), PROFILES[name])
    found = there.product(x.to(CUDA)).cpu()
    if name.startswith("fp8"):  # rounds activations to e4m3 as well, and gives bfloat16
        step = x.abs().amax(1, keepdim=True) / E4M3_LARGEST
        rounded = (x / step).to(torch.float8_e4m3fn).double() * step.double()
        wanted = (rounded @ matrix.whole().double().T).float()
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0.05)
    else:
        torch.testing.assert_close(found, matrix.product(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["", *ROUNDED])
def test_a_captured_graph_computes_with_the_numbers_of_the_newest_version(
    name: str, tmp_path: Path
) -> None:
    for seed in range(2):
        save_random(tmp_path / str(seed), "llama", seed=seed, **SHAPE, **HEADS)
    model = ServedModel(
        read_config(tmp_path / "0"), torch.bfloat16, 64, PROFILES.get(name), device=CUDA
    )
    x = torch.randn(32, 128, device=CUDA, dtype=torch.bfloat16)
    with torch.inference_mode():
        weights, fresh = model.load(tmp_path / "0"), model.load(tmp_path / "1")
        before = project(x, weights.layers[0].qkv)  # the first call chooses kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = project(x, weights.layers[0].qkv)
        serve_staged(weights, model.staged(tmp_path / "1"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, project(x, fresh.layers[0].qkv))
        assert not torch.equal(out, before)
