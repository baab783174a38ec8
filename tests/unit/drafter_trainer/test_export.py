"""Exported drafters: config.json and tensor names as the engines' loaders have them, written out,
read back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import save_random
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from paceline.errors import ConfigError, InvalidInput, PacelineError, WeightsError
from paceline.models.config import read_config
from paceline.services.drafter_trainer.export import HOT_VOCABULARY, Format, app, export_checkpoint
from paceline.speculators.dflash import DflashNet, DflashOptions
from paceline.speculators.eagle import EagleNet, EagleOptions
from paceline.speculators.lstm import LstmNet, LstmOptions
from paceline.speculators.net import read_drafter
from paceline.speculators.vocabulary import frequent_tokens

V, H, DRAFT, INNER, N = 97, 48, 20, 32, 3
LAYER = {
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_random(tmp_path / "model", "llama", num_hidden_layers=4)
    return tmp_path / "model"


def eagle(model: Path, **options: Any) -> Path:
    net = EagleNet(read_config(model), EagleOptions(**options), seed=1)
    directory = model.parent / "drafter"
    net.save(directory)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 7}))
    return directory


def written(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((directory / "config.json").read_text())
    if (directory / "pytorch_model.bin").exists():
        return config, torch.load(directory / "pytorch_model.bin", weights_only=True)
    return config, load_file(directory / "model.safetensors")


def made_up(
    directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], **more: Tensor
) -> Path:
    generator = torch.Generator().manual_seed(0)
    directory.mkdir()
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors | more, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_sglangs_eagle_always_has_the_bias_that_it_would_else_draw_at_random(
    model: Path, tmp_path: Path
) -> None:
    source = eagle(model)
    export_checkpoint(source, model, tmp_path / "out", Format.SGLANG)
    config, tensors = written(tmp_path / "out")
    assert tensors.keys() == {"fc.weight", "fc.bias", *LAYER}
    assert torch.equal(tensors["fc.bias"], torch.zeros(H))
    assert torch.equal(tensors["fc.weight"], load_file(source / "model.safetensors")["fc.weight"])
    expected = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    assert expected.items() <= config.items()
    assert (config["max_position_embeddings"], config["torch_dtype"]) == (256, "float32")
    assert isinstance(read_drafter(tmp_path / "out", read_config(model)), EagleNet)


def test_vllms_eagle_has_its_own_architecture_and_no_bias(model: Path, tmp_path: Path) -> None:
    export_checkpoint(eagle(model), model, tmp_path / "out", Format.VLLM, torch.bfloat16)
    config, tensors = written(tmp_path / "out")
    assert tensors.keys() == {"fc.weight", *LAYER}
    assert (config["architectures"], config["torch_dtype"]) == (
        ["EagleLlamaForCausalLM"],
        "bfloat16",
    )
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_a_bias_that_vllm_would_not_add_is_refused_unless_it_is_zero(
    model: Path, tmp_path: Path
) -> None:
    source = eagle(model, fc_bias=True)
    export_checkpoint(source, model, tmp_path / "out", Format.VLLM)
    assert "fc.bias" not in written(tmp_path / "out")[1]
    tensors = load_file(source / "model.safetensors")
    tensors["fc.bias"][3] = 0.1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(InvalidInput, match="no bias after fc"):
        export_checkpoint(source, model, tmp_path / "other", Format.VLLM)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("form", [Format.SGLANG, Format.VLLM])
def test_norms_that_eagle_1_lacks_are_refused(model: Path, tmp_path: Path, form: Format) -> None:
    with pytest.raises(InvalidInput, match=r"no norms of its inputs.*norms=true"):
        export_checkpoint(eagle(model, norms=True), model, tmp_path / "out", form)
    assert not (tmp_path / "out").exists()


def test_the_draft_vocabulary_of_an_eagle_is_a_file_that_sglang_reads(
    model: Path, tmp_path: Path
) -> None:
    net = EagleNet(read_config(model), EagleOptions(draft_vocab_size=DRAFT), seed=1)
    net.choose_tokens(torch.arange(V) % 5)
    net.save(tmp_path / "drafter")
    for form, there in ((Format.SGLANG, True), (Format.NATIVE, False)):
        out = tmp_path / form.value
        export_checkpoint(tmp_path / "drafter", model, out, form)
        assert (out / HOT_VOCABULARY).exists() == there
        assert ("d2t" in written(out)[1]) != there
    chosen = torch.load(tmp_path / "sglang" / HOT_VOCABULARY, weights_only=True)
    assert chosen == frequent_tokens(torch.arange(V) % 5, DRAFT).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_native_export_reads_back_as_the_same_drafter(tmp_path: Path, family: str) -> None:
    model = tmp_path / "model"
    save_random(model, family)
    source = eagle(model)
    export_checkpoint(source, model, tmp_path / "out", Format.NATIVE)
    target = read_config(model)
    before, after = read_drafter(source, target), read_drafter(tmp_path / "out", target)
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name
    assert written(tmp_path / "out")[0]["max_position_embeddings"] == 256


@pytest.mark.parametrize(
    ("family", "form", "allowed"),
    [
        ("llama", Format.ARCTIC, "sglang', 'vllm', 'native"),
        ("qwen2", Format.VLLM, "sglang', 'native"),
        ("qwen3", Format.SGLANG, "'native'"),
    ],
)
def test_a_format_that_a_kind_lacks_is_refused_naming_those_it_has(
    tmp_path: Path, family: str, form: Format, allowed: str
) -> None:
    save_random(tmp_path / "model", family)
    with pytest.raises(InvalidInput, match=allowed):
        export_checkpoint(eagle(tmp_path / "model"), tmp_path / "model", tmp_path / "out", form)


EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": V,
    "draft_vocab_size": DRAFT,
    "hidden_size": H,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
EAGLE3_SHAPES: dict[str, tuple[int, ...]] = {
    "fc.weight": (H, 3 * H),
    "norm.weight": (H,),
    "lm_head.weight": (DRAFT, H),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (48, 2 * H),
    "midlayer.self_attn.k_proj.weight": (24, 2 * H),
    "midlayer.self_attn.v_proj.weight": (24, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, 48),
    "midlayer.mlp.gate_proj.weight": (80, H),
    "midlayer.mlp.up_proj.weight": (80, H),
    "midlayer.mlp.down_proj.weight": (H, 80),
}


def vocabulary() -> dict[str, Tensor]:
    chosen = torch.arange(DRAFT) * 4 + 3
    listed = torch.zeros(V, dtype=torch.bool)
    listed[chosen] = True
    return {"d2t": chosen - torch.arange(DRAFT), "t2d": listed}


@pytest.mark.parametrize("form", [Format.SGLANG, Format.VLLM])
def test_eagle3_keeps_sglangs_names_and_numbers_its_layers_as_each_engine_does(
    model: Path, tmp_path: Path, form: Format
) -> None:
    source = made_up(tmp_path / "source", EAGLE3_CONFIG, EAGLE3_SHAPES, **vocabulary())
    export_checkpoint(source, model, tmp_path / "out", form, torch.bfloat16)
    config, tensors = written(tmp_path / "out")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == EAGLE3_SHAPES | {
        "d2t": (DRAFT,),
        "t2d": (V,),
    }
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert (tensors["fc.weight"].dtype, config["max_position_embeddings"]) == (torch.bfloat16, 256)
    assert (config["draft_vocab_size"], config["tie_word_embeddings"]) == (DRAFT, False)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config.get("eagle_aux_hidden_state_layer_ids") == (
        [1, 2, 3] if form is Format.VLLM else None
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"d2t": -torch.arange(DRAFT)}, "d2t is not ascending"),
        ({"t2d": torch.zeros(V, dtype=torch.bool)}, "t2d and d2t name other tokens"),
        (
            {"d2t": torch.zeros(DRAFT - 1, dtype=torch.int64)},
            r"tensor d2t has a wrong shape; seen: \(19,\); allowed: \(20,\)",
        ),
        ({"norm.bias": torch.zeros(H)}, "tensor norm.bias is not part"),
        ({"fc.weight": torch.zeros(H, 2 * H)}, "tensor fc.weight has a wrong shape"),
        ({"lm_head.weight": torch.full((DRAFT, H), torch.nan)}, "not finite"),
    ],
)
def test_an_eagle3_that_loaders_would_misread_in_silence_is_refused(
    model: Path, tmp_path: Path, change: dict[str, Tensor], named: str
) -> None:
    source = made_up(tmp_path / "source", EAGLE3_CONFIG, EAGLE3_SHAPES, **(vocabulary() | change))
    with pytest.raises(WeightsError, match=named):
        export_checkpoint(source, model, tmp_path / "out", Format.SGLANG)


def test_an_eagle3_whose_residual_is_normed_is_refused_for_sglang_which_would_ignore_that(
    model: Path, tmp_path: Path
) -> None:
    normed = EAGLE3_CONFIG | {"norm_before_residual": True}
    source = made_up(tmp_path / "source", normed, EAGLE3_SHAPES, **vocabulary())
    with pytest.raises(InvalidInput, match="norm_before_residual=true"):
        export_checkpoint(source, model, tmp_path / "out", Format.SGLANG)
    export_checkpoint(source, model, tmp_path / "out", Format.VLLM)
    assert written(tmp_path / "out")[0]["norm_before_residual"] is True


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_dflash_drafter_keeps_the_published_names_and_keys_for_sglang(
    tmp_path: Path, family: str
) -> None:
    save_random(tmp_path / "model", family, num_hidden_layers=5)
    target = read_config(tmp_path / "model")
    net = DflashNet.fresh(target, DflashOptions(block_size=4, layers=2), seed=1)
    net.save(tmp_path / "drafter")
    export_checkpoint(
        tmp_path / "drafter", tmp_path / "model", tmp_path / "out", Format.SGLANG, torch.bfloat16
    )
    config, tensors = written(tmp_path / "out")
    assert {name: tuple(one.shape) for name, one in tensors.items()} == net.shapes()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert (config["block_size"], config["num_hidden_layers"]) == (4, 2)
    assert config["dflash_config"] == {"mask_token_id": 96, "target_layer_ids": [0, 1, 2]}
    assert config["max_position_embeddings"] == 256
    again = read_drafter(tmp_path / "out", target)
    assert isinstance(again, DflashNet)
    assert again.shape == net.shape
    with pytest.raises(InvalidInput, match=r"allowed: \['sglang', 'native'\]"):
        export_checkpoint(tmp_path / "drafter", tmp_path / "model", tmp_path / "other", Format.VLLM)


LSTM_CONFIG = {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "vocab_size": V,
    "input_hidden_dim": H,
    "inner_dim": INNER,
    "proj_dim": INNER,
    "emb_dim": str(INNER),
    "n_predict": N,
    "method": "sum_lstm",
    "tie_weights": True,
    "tie_lstm_embs": True,
    "scale_input": True,
}
LSTM_SHAPES: dict[str, tuple[int, ...]] = {
    "forget_emb.0.weight": (V, INNER),
    "head.0.weight": (V, INNER),
    **{f"{gate}_proj.0.weight": (INNER, H) for gate in ("forget", "input", "output", "cell")},
    **{f"{gate}_proj.1.weight": (INNER, INNER) for gate in ("forget", "input", "output", "cell")},
    **{
        f"{norm}.0.{part}": (INNER,)
        for norm in ("cell_ln", "state_ln")
        for part in ("weight", "bias")
    },
}


def test_arctics_lstm_is_a_pickle_of_unprefixed_names_with_all_tied_ones(
    model: Path, tmp_path: Path
) -> None:
    source = made_up(tmp_path / "source", LSTM_CONFIG, LSTM_SHAPES)
    export_checkpoint(source, model, tmp_path / "out", Format.ARCTIC, torch.bfloat16)
    config, tensors = written(tmp_path / "out")
    ties = {f"{gate}_emb.0.weight" for gate in ("input", "output", "cell")} | {
        "head.1.weight",
        "head.2.weight",
    }
    assert tensors.keys() == LSTM_SHAPES.keys() | ties
    assert tensors["cell_emb.0.weight"].data_ptr() == tensors["forget_emb.0.weight"].data_ptr()
    assert torch.equal(tensors["head.2.weight"], tensors["head.0.weight"])
    assert {key: config[key] for key in ("inner_dim", "proj_dim", "emb_dim")} == dict.fromkeys(
        ("inner_dim", "proj_dim", "emb_dim"), "32"
    )
    assert config["model_type"] == "mlp_speculator"
    assert config["top_k_tokens_per_head"] == [1, 1, 1]
    assert config["base_model_name_or_path"] == ""
    assert (config["max_position_embeddings"], config["torch_dtype"]) == (256, "bfloat16")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "sum_gru"}, "method does not fit an LSTM drafter"),
        ({"input_hidden_dim": 64}, "input_hidden_dim of drafter"),
        ({"inner_dim": "64.32"}, r"inner_dim is no width"),
        ({"n_predict": 0}, "n_predict must be a whole number"),
        ({"vocab_size": 98}, "vocab_size of drafter"),
    ],
)
def test_an_lstm_that_arctic_cannot_serve_is_refused_by_key(
    model: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    source = made_up(tmp_path / "source", LSTM_CONFIG | change, LSTM_SHAPES)
    with pytest.raises(PacelineError, match=named):
        export_checkpoint(source, model, tmp_path / "out", Format.ARCTIC)


def test_an_lstm_with_an_embedding_for_each_gate_is_refused_for_arctic(
    model: Path, tmp_path: Path
) -> None:
    LstmNet.fresh(read_config(model), LstmOptions(tie_lstm_embs=False), 0).save(tmp_path / "source")
    with pytest.raises(InvalidInput, match="tie_lstm_embs=false"):
        export_checkpoint(tmp_path / "source", model, tmp_path / "out", Format.ARCTIC)


def test_a_directory_with_files_is_not_written_into(model: Path) -> None:
    source = eagle(model)
    with pytest.raises(ConfigError, match="not empty"):
        export_checkpoint(source, model, source, Format.SGLANG)


def test_the_command_exports_and_names_what_it_refuses(model: Path, tmp_path: Path) -> None:
    arguments = ["--from", str(eagle(model)), "--model", str(model), "--dtype", "bfloat16"]
    done = CliRunner().invoke(
        app, [*arguments, "--out", str(tmp_path / "out"), "--format", "sglang"]
    )
    assert done.exit_code == 0, done.output
    assert written(tmp_path / "out")[1]["fc.bias"].dtype == torch.bfloat16
    refused = CliRunner().invoke(
        app, [*arguments, "--out", str(tmp_path / "other"), "--format", "arctic"]
    )
    assert refused.exit_code == 2
    assert "seen: arctic; allowed: ['sglang', 'vllm', 'native']" in refused.output
    assert (
        "--speculative-algorithm EAGLE"
        in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    )
