"""Errors of the embedded engine before any request: they name the fault, the value seen and the
values allowed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import save_random
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import DataLoss, InvalidInput, PacelineError, WeightsError
from paceline.models.config import read_config
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.sampling import Sampling
from paceline.speculators.eagle import EagleNet

Tensors = dict[str, Tensor]
LAYERS, COUNT = "1 to 4096", "1 to 2147483647"
UP, FC = "model.layers.1.mlp.up_proj.weight", "fc.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter that fit, in one file each."""
    directory = tmp_path_factory.mktemp("saved")
    model = save_random(directory / "shards", "llama")
    model.save_pretrained(directory / "target")
    EagleNet(read_config(directory / "target")).save(directory / "drafter")
    return directory


@pytest.fixture
def models(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "models")


def build(models: Path, target: str = "target") -> Engine:
    return EmbeddedEngine(
        EmbeddedSpec.model_validate(
            {
                "model_dir": str(models / target),
                "drafter": str(models / "drafter"),
                "max_sequence_tokens": 64,
            }
        )
    )


def refused(models: Path, error: type[PacelineError], target: str = "target") -> PacelineError:
    with pytest.raises(PacelineError) as caught:
        build(models, target)
    assert type(caught.value) is error
    return caught.value


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "removed"}))


def change_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def test_the_checkpoints_that_the_tests_spoil_are_served(models: Path) -> None:
    for target in ("target", "shards"):
        engine = build(models, target)
        engine.force_arm("eagle:3_1_4")
        engine.enqueue(Request(0, (5, 6, 7), Sampling(seed=1, max_tokens=4)))
        assert [
            len(chunk.token_ids) for _ in range(9) if engine.has_work for chunk in engine.step()
        ] == [4]


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors, str], object], str, str, str]] = {
    # change(tensors, name), message, seen, allowed
    "missing": (
        lambda t, name: t.pop(name),
        "tensor {name} is missing",
        "tensors",
        "of shape {shape}",
    ),
    "extra": (
        lambda t, name: t.update({name + ".extra": torch.zeros(3)}),
        "tensor {name}.extra is not part of this model",
        "of shape (3,)",
        "{name}",
    ),
    "integers": (
        lambda t, name: t.update({name: t[name].to(torch.int8)}),
        "tensor {name} has a wrong dtype",
        "torch.int8",
        "torch.bfloat16",
    ),
    "eight-bit floats": (
        lambda t, name: t.update({name: t[name].to(torch.float8_e4m3fn)}),
        "tensor {name} has a wrong dtype",
        "torch.float8_e4m3fn",
        "torch.float32",
    ),
    "transposed": (
        lambda t, name: t.update({name: t[name].t()}),
        "tensor {name} has a wrong shape",
        "{turned}",
        "{shape}",
    ),
    "nan": (
        lambda t, name: t[name][3:5, 4].fill_(float("nan")),
        "tensor {name} holds 2 numbers",
        "nan",
        "finite",
    ),
    "infinite": (
        lambda t, name: t[name][0, :1].fill_(float("-inf")),
        "tensor {name} holds 1 numbers",
        "-inf",
        "finite",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize(("part", "name"), [("target", UP), ("drafter", FC)])
def test_a_wrong_tensor_is_named(part: str, name: str, fault: str, models: Path) -> None:
    change, message, seen, allowed = TENSOR_FAULTS[fault]
    shape = tuple(load_file(models / part / "model.safetensors")[name].shape)
    change_tensors(models / part, lambda tensors: change(tensors, name))
    error = refused(models, WeightsError)
    filled = {"name": name, "shape": shape, "turned": shape[::-1]}
    assert message.format(**filled) in error.message
    assert seen.format(**filled) in (error.seen or "")
    assert allowed.format(**filled) in (error.allowed or "")
    assert (str(models / "drafter") in error.message) == (part == "drafter")


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(part: str, kept: float, models: Path) -> None:
    path = models / part / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    error = refused(models, DataLoss)
    assert "model.safetensors" in error.message
    assert error.seen == f"{path}, {int(len(content) * kept)} bytes"
    assert error.allowed == "a whole safetensors file"


def test_a_lost_shard_is_noticed_by_its_tensors(models: Path) -> None:
    shards = sorted((models / "shards").glob("model-*.safetensors"))
    lost = min(load_file(shards[1]))
    shards[1].unlink()
    assert f"tensor {lost} is missing, as are" in refused(models, WeightsError, "shards").message


def test_a_tensor_in_two_shards_is_refused(models: Path) -> None:
    first, second = sorted((models / "shards").glob("model-*.safetensors"))[:2]
    name = min(load_file(first))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    error = refused(models, WeightsError, "shards")
    assert error.message == f"tensor {name} is in two files"
    assert error.seen == second.name


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("values", "named", "seen", "allowed"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architectures",
            "MambaForCausalLM",
            "Qwen3ForCausalLM",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures", "LlamaForCausalLM", "a list"),
        ({"architectures": "removed"}, "architectures", "(none)", "a list"),
        ({"num_hidden_layers": "removed"}, "num_hidden_layers", "(none)", LAYERS),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "0", LAYERS),
        ({"hidden_size": "48"}, "hidden_size", "48", COUNT),
        ({"num_attention_heads": True}, "num_attention_heads", "True", COUNT),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "4, 3", "divides 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads", "0", COUNT),
        ({"head_dim": 7}, "head_dim", "7", "2, 4"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps", "small", "> 0"),
        ({"max_position_embeddings": -1}, "max_position_embeddings", "-1", COUNT),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "no", "true, false"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "</s>", ">= 0"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu", "silu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type", "yarn", "llama3"),
        ({"rope_parameters": "llama3"}, "rope_parameters", "llama3", "an object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor", "(none)", "> 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, "factor", "-2", "> 0"),
        ({"rope_parameters": LLAMA3}, "original_max_position_embeddings", "(none)", COUNT),
        (
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
            "high_freq_factor",
            "1.0",
            "> 1.0",
        ),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta", "0", "> 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5", "1.0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_setting_of_a_checkpoint_that_cannot_work_is_named(
    part: str, values: dict[str, Any], named: str, seen: str, allowed: str, models: Path
) -> None:
    change_config(models / part, **values)
    error = refused(models, InvalidInput)
    assert named in error.message
    assert str(models / part) in error.message
    assert error.seen == seen
    if part == "target" or named not in ("architectures", "hidden_size", "num_hidden_layers"):
        assert allowed in (error.allowed or "")


@pytest.mark.parametrize(
    ("values", "named", "seen", "allowed"),
    [
        ({"vocab_size": 101}, "vocab_size", "101", "97"),
        ({"hidden_size": 64}, "hidden_size", "64", "48"),
        ({"num_hidden_layers": 2}, "num_hidden_layers", "2", "1"),
        (
            {"architectures": ["Qwen2ForCausalLMEagle"]},
            "architectures",
            "['Qwen2ForCausalLMEagle']",
            "['LlamaForCausalLMEagle']",
        ),
    ],
    ids=str,
)
def test_a_drafter_of_another_target_is_refused(
    values: dict[str, Any], named: str, seen: str, allowed: str, models: Path
) -> None:
    change_config(models / "drafter", **values)
    error = refused(models, InvalidInput)
    assert named in error.message
    assert (error.seen, error.allowed) == (seen, allowed)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MedusaModel"])
def test_a_checkpoint_of_no_known_drafter_is_refused(name: str, models: Path) -> None:
    change_config(models / "drafter", architectures=[name])
    error = refused(models, InvalidInput)
    assert "architectures" in error.message
    assert error.seen == name
    assert "LlamaForCausalLMEagle" in (error.allowed or "").split(", ")


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
@pytest.mark.parametrize(
    "name", ["target/config.json", "drafter/config.json", "target/generation_config.json"]
)
def test_a_config_that_is_no_object_is_named(name: str, text: str, models: Path) -> None:
    change_config(models / "target", eos_token_id="removed")
    path = models / name
    path.write_text(text)
    error = refused(models, InvalidInput)
    assert path.name in error.message
    assert error.seen == str(path)


@pytest.mark.parametrize(
    ("length", "fits"), [(0, False), (1, True), (63, True), (64, False), (300, False)]
)
def test_a_prompt_beyond_the_context_is_refused(length: int, fits: bool, models: Path) -> None:
    engine = build(models)
    request = Request(0, tuple(3 + i % 90 for i in range(length)), Sampling(seed=1, max_tokens=4))
    if fits:
        engine.enqueue(request)
        return
    with pytest.raises(
        InvalidInput, match=f"prompt does not fit; seen: {length} tokens; allowed: 1 to 63 tokens"
    ):
        engine.enqueue(request)
    assert not engine.has_work


def test_the_context_is_the_models_when_more_is_asked_for(models: Path) -> None:
    change_config(models / "target", max_position_embeddings=32)
    engine = build(models)
    assert engine.info.max_sequence_tokens == 32
    with pytest.raises(InvalidInput, match="allowed: 1 to 31 tokens"):
        engine.enqueue(Request(0, (5,) * 32, Sampling(seed=1, max_tokens=4)))
