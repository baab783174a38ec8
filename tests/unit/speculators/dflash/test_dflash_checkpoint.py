"""DFlash checkpoints: names of the published format, strict refusals, the block and its MASK."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.drafter_trainer.samples import chain_logits
from unit.speculators.dflash_rows import BLOCK, MASK, rough_net
from unit.speculators.eagle3_rows import TARGET, document

from paceline.errors import InvalidInput, WeightsError
from paceline.speculators.dflash import DflashNet, DflashOptions
from paceline.speculators.kinds import dflash_inner_layers
from paceline.speculators.net import read_drafter

LAYER_NAMES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
PUBLISHED_NAMES = {
    *("fc.weight", "hidden_norm.weight", "norm.weight"),
    *(f"layers.{layer}.{name}.weight" for layer in range(2) for name in LAYER_NAMES),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"layers": 1, "inner_layers": (1, 7), "block_size": 3}])
def test_a_read_checkpoint_predicts_what_the_saved_one_did(
    family: str, options: dict[str, object], tmp_path: Path
) -> None:
    target = replace(TARGET, family=family, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    net, row = rough_net(target, **options), document(7, 1)
    net.save(tmp_path)
    again = read_drafter(tmp_path, target)
    assert isinstance(again, DflashNet)
    assert again.shape == net.shape
    again.bind(net.embed, net.head)
    row = replace(row, states=row.states.repeat(1, 2)[:, : 16 * 8], layers="1,2,3,4,5,6,7,last")
    with torch.no_grad():
        first, second = (torch.stack(chain_logits(one, row, BLOCK)) for one in (net, again))
    assert torch.equal(first, second)
    assert again.twin().shape == net.shape


def test_names_and_keys_are_those_of_published_checkpoints(tmp_path: Path) -> None:
    rough_net().save(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == PUBLISHED_NAMES
    raw = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 8,
        "block_size": BLOCK,
        # The layers with outputs that enter layers 2, 4 and 5.
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4]},
    }
    assert expected.items() <= raw.items()


def rewritten(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return directory


DFLASH = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"vocab_size": 38}, "vocab_size of drafter and target differ"),
        ({"hidden_size": 8}, "hidden_size of drafter and target differ"),
        ({"num_target_layers": 9}, "num_target_layers.*seen: 9; allowed: 8"),
        ({"block_size": 1}, "block_size must be a whole number; seen: 1; allowed: 2 to 64"),
        ({"block_size": None}, r"block_size must be a whole number; seen: \(none\)"),
        ({"dflash_config": [1]}, "dflash_config must be an object"),
        ({"dflash_config": DFLASH | {"mask_token_id": 37}}, "no row of the target's embedding"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 4]}}, "mask_token_id must be"),
        ({"dflash_config": DFLASH | {"target_layer_ids": [1, 3, 7]}}, "target_layer_ids"),
        ({"dflash_config": DFLASH | {"target_layer_ids": "1,3"}}, "target_layer_ids"),
        ({"dflash_config": DFLASH | {"projector_type": "domino"}}, "projector_type is not"),
        ({"is_causal": True}, "is_causal is not supported"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer_types is not supported"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_its_key(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    rough_net().save(tmp_path)
    with pytest.raises(InvalidInput, match=named):
        DflashNet.read(rewritten(tmp_path, **changes), TARGET)


def test_another_block_than_the_checkpoint_was_trained_for_is_refused(tmp_path: Path) -> None:
    rough_net().save(tmp_path)
    options = DflashOptions(block_size=BLOCK, gamma=2.0)
    assert DflashNet.read(tmp_path, TARGET, options).options.gamma == 2.0
    with pytest.raises(InvalidInput, match=r"block_size is not .*seen: 8; allowed: 5"):
        DflashNet.read(tmp_path, TARGET, DflashOptions(block_size=8))


def test_keys_at_the_top_of_config_json_and_prefixed_names_are_read_too(tmp_path: Path) -> None:
    net = rough_net()
    net.save(tmp_path)
    rewritten(tmp_path, dflash_config=None, **DFLASH)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    named["lm_head.weight"] = torch.zeros(37, 16)
    save_file(named, tmp_path / "model.safetensors")
    assert DflashNet.read(tmp_path, TARGET).shape == net.shape


def test_missing_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    rough_net().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    fewer = {name: one for name, one in tensors.items() if name != "layers.1.mlp.up_proj.weight"}
    save_file(fewer, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight is missing"):
        DflashNet.read(tmp_path, TARGET)
    save_file(tensors | {"fc.weight": torch.zeros(16, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"fc.weight has a wrong shape"):
        DflashNet.read(tmp_path, TARGET)


def test_layers_are_those_that_a_config_names_or_eagle3s() -> None:
    assert dflash_inner_layers({}, 28) == (2, 14, 25)
    assert dflash_inner_layers({"target_layer_ids": [1, 9, 17, 25, 33]}, 36) == (2, 10, 18, 26, 34)
    assert dflash_inner_layers({"dflash_config": {"target_layer_ids": [0]}}, 2) == (1,)
