"""The engine's forward equals transformers; wrong checkpoints are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from random_models import FAMILIES, load_model, random_model, save_random
from safetensors.torch import load_file, save_file

from paceline.errors import DataLoss, InvalidInput, WeightsError
from paceline.models import decoder, products
from paceline.models.cache import StaticCache, cache_rows
from paceline.models.config import parse_config, read_config
from paceline.models.decoder import (
    DecoderWeights,
    attend,
    forward_hidden,
    head_logits,
    make_block,
)
from paceline.models.in_place import ServedModel
from paceline.models.loading import read_tensors

CPU = torch.device("cpu")
TOKENS = 120


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def _asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the product: with oneDNN, rows without a token follow the rows of a block."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    monkeypatch.setattr(products, "ONEDNN", request.param)
    monkeypatch.setattr(decoder, "FEWEST_SCORES", 1)  # attention by products too


def cache_for(weights: DecoderWeights, dtype: torch.dtype = torch.float32) -> StaticCache:
    config = weights.config
    return StaticCache(
        config, layers=config.num_layers, slots=6, capacity=TOKENS + 8, dtype=dtype, device=CPU
    )


def forward_in_pieces(
    weights: DecoderWeights,
    ids: torch.Tensor,
    slots: list[int],
    cuts: list[int],
    inner: tuple[int, ...] = (),
) -> torch.Tensor:
    """Hidden states [B, T, W] of a prefill followed by blocks, as the engine runs them."""
    cache, parts = cache_for(weights, weights.head.dtype), []
    positions = torch.arange(ids.shape[1]).expand(len(slots), -1)
    for start, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        block = make_block(
            weights.config,
            weights.rotation,
            cache,
            cache_rows(slots),
            positions[:, start:end].contiguous(),
            end,
        )
        hidden = forward_hidden(weights, cache, ids[:, start:end], block, inner)
        parts.append(hidden.view(len(slots), end - start, -1))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slots", [[2, 3, 4], [4, 0, 3]], ids=["adjacent", "scattered"])
@pytest.mark.usefixtures("_asked")
def test_logits_and_hidden_states_equal_transformers(
    family: str, slots: list[int], tmp_path: Path
) -> None:
    model = save_random(tmp_path, family)
    weights = load_model(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 97, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids, output_hidden_states=True)
        hidden = forward_in_pieces(weights, ids, slots, [96, 97, 105])
    torch.testing.assert_close(hidden, expected.hidden_states[-1], atol=1e-5, rtol=0)
    torch.testing.assert_close(head_logits(weights, hidden), expected.logits, atol=1e-5, rtol=0)


def test_a_forward_for_the_cache_alone_writes_the_same_cells(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    weights = load_model(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    caches = [cache_for(weights), cache_for(weights)]
    positions = torch.arange(30).expand(2, -1)
    with torch.inference_mode():
        for cache, only in zip(caches, (False, True), strict=True):
            block = make_block(weights.config, weights.rotation, cache, slice(0, 2), positions, 30)
            states = forward_hidden(weights, cache, ids, block, (1,), cache_only=only)
            assert len(states) == 60 * (not only)
    assert caches[0].data.any()
    assert torch.equal(caches[0].data, caches[1].data)


def test_head_norms_of_a_model_with_one_kv_head_are_served(tmp_path: Path) -> None:
    model = save_random(tmp_path, "qwen3", num_key_value_heads=1)
    weights = load_model(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids, output_hidden_states=True).hidden_states[-1]
        hidden = forward_in_pieces(weights, ids, [1, 2], [20, 21])
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=0)


@pytest.mark.few(10)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inner", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.usefixtures("_asked")
def test_inner_states_are_those_that_enter_transformers_layers(
    family: str, inner: tuple[int, ...], tmp_path: Path
) -> None:
    model = save_random(tmp_path, family)
    weights = load_model(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids, output_hidden_states=True)
        rows = forward_in_pieces(weights, ids, [2, 3], [30, 31], inner)
        plain = forward_in_pieces(weights, ids, [2, 3], [30, 31])
    wanted = torch.cat([expected.hidden_states[index] for index in (*inner, -1)], dim=-1)
    torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=0)
    assert torch.equal(rows[..., -48:], plain), "asking for inner states changes no other number"
    torch.testing.assert_close(head_logits(weights, rows), expected.logits, atol=1e-5, rtol=0)


def test_rows_at_different_positions_do_not_see_each_other(tmp_path: Path) -> None:
    model = save_random(tmp_path, "llama")
    weights = load_model(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(2))
    lengths = [31, 9]
    cache = cache_for(weights)
    with torch.inference_mode():
        for row, length in enumerate(lengths):
            positions = torch.arange(length)[None]
            block = make_block(
                weights.config, weights.rotation, cache, slice(row, row + 1), positions, length
            )
            forward_hidden(weights, cache, ids[row : row + 1, :length], block)
        positions = torch.tensor(lengths)[:, None] + torch.arange(4)
        tokens = ids.gather(1, positions)
        block = make_block(weights.config, weights.rotation, cache, slice(0, 2), positions, 35)
        logits = head_logits(weights, forward_hidden(weights, cache, tokens, block)).view(
            *tokens.shape, -1
        )
        for row, length in enumerate(lengths):
            expected = model(ids[row : row + 1, : length + 4]).logits[0, length:]
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=0)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = save_random(tmp_path, "qwen3")
    weights = load_model(tmp_path, dtype=torch.bfloat16)
    ids = torch.arange(30)[None] % 97
    with torch.inference_mode():
        hidden = forward_in_pieces(weights, ids, [0], [20])
        expected = model(ids, output_hidden_states=True).hidden_states[-1]
    assert hidden.dtype == torch.bfloat16
    assert (hidden.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_both_forms_of_rope_settings_read_the_same() -> None:
    raw = random_model("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    new = raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    old = {key: value for key, value in raw.items() if key != "rope_parameters"} | {
        "rope_theta": 5e5
    }
    assert parse_config(new).rope == parse_config(old).rope
    assert parse_config(new).rope.theta == 5e5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_name(
    change: dict[str, object], named: str
) -> None:
    raw = random_model("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(InvalidInput, match=named):
        parse_config(raw | change)


def test_a_directory_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(InvalidInput, match="safetensors"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "dtype", "nan"])
def test_a_wrong_tensor_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    config, tensors = read_config(tmp_path), read_tensors(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    match fault:
        case "missing":
            tensors.pop(name)
        case "extra":
            name = "model.layers.9.mlp.up_proj.weight"
            tensors[name] = torch.zeros(1)
        case "shape":
            tensors[name] = tensors[name].t().contiguous()
        case "dtype":
            tensors[name] = tensors[name].to(torch.int8)
        case "nan":
            tensors[name][3, 4] = float("nan")
    with pytest.raises(WeightsError, match=name):
        ServedModel(config, torch.float32, 16).build(tensors)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    path = sorted(tmp_path.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataLoss, match=path.name):
        read_tensors(tmp_path)


def test_the_head_hash_is_that_of_the_stored_bytes(tmp_path: Path) -> None:
    import hashlib

    save_random(tmp_path, "llama")
    tensors = read_tensors(tmp_path)
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "half.safetensors")
    stored = load_file(tmp_path / "half.safetensors")["lm_head.weight"]
    expected = hashlib.sha256(stored.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    weights = ServedModel(read_config(tmp_path), torch.float32, 16).build(halves)
    assert weights.head_hash == expected


def test_attention_by_products_is_that_of_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    monkeypatch.setattr(products, "ONEDNN", True)
    save_random(tmp_path, "llama")
    config = read_config(tmp_path)
    kv, group, dim = config.num_kv_heads, config.group, config.head_dim
    start, tokens = 300, 160  # more rows than one part of the scores
    cache = StaticCache(config, layers=1, slots=2, capacity=512, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    cache.data.normal_(generator=generator)
    queries = torch.randn(2 * tokens, kv * group, dim, generator=generator)
    # The second row starts earlier, so the first row sees positions that the second does not.
    positions = torch.arange(tokens) + torch.tensor([[start], [start - 100]])
    rotation = torch.ones(512, dim // 2, dtype=torch.complex64)
    block = make_block(config, rotation, cache, slice(0, 2), positions, start + tokens)
    monkeypatch.delattr(decoder.functional, "scaled_dot_product_attention")  # not torch's own
    with torch.inference_mode():
        found = attend(config, queries, cache, 0, block).view(2, tokens, kv, group, dim)
    keys, values = (part[0].double() for part in cache.views(slice(0, 2), block.length))
    asked = queries.view(2, tokens, kv, group, dim).double()
    scores = torch.einsum("btkgd,bkld->bkgtl", asked, keys) * dim**-0.5
    hidden = torch.arange(block.length) > positions[:, None, None, :, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = torch.einsum("bkgtl,bkld->btkgd", weights, values)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
