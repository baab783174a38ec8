"""Starting SGLang: its drafter, its arguments, and settings that are rejected before the launch."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from paceline.config.load import load_config, toml_value
from paceline.errors import ConfigError
from paceline.models.config import read_config
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.sglang import host
from paceline.services.rollout_gateway.engines.sglang.hook_points import RELEASE
from paceline.services.rollout_gateway.engines.sglang.spec import SGLangSpec, row_layout
from paceline.speculators.eagle import EagleNet, EagleOptions

DEMO = Path(__file__).parents[4] / "examples" / "demo"


def spec(**settings: Any) -> SGLangSpec:
    return SGLangSpec.model_validate({"model_dir": str(DEMO / "policy_start"), **settings})


@pytest.mark.parametrize(
    ("architecture", "speculator"),
    [
        ("LlamaForCausalLMEagle", "eagle"),
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("Qwen2ForCausalLMEagle", "eagle"),
    ],
)
def test_the_speculator_follows_the_drafters_architecture(
    tmp_path: Path, architecture: str, speculator: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert spec(drafter=str(tmp_path)).speculator == speculator


@pytest.mark.parametrize(
    ("drafter", "named"),
    [("/nowhere", "/nowhere"), (str(DEMO / "policy_start"), "LlamaForCausalLM")],
)
def test_a_drafter_that_sglang_cannot_serve_is_refused_by_name(drafter: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _ = spec(drafter=drafter).arm_names


def test_a_block_drafter_is_refused_by_name_whether_fresh_or_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
    with pytest.raises(ConfigError, match=r"not served; seen: DFlashDraftModel"):
        _ = spec(drafter=str(tmp_path)).arm_names
    with pytest.raises(ConfigError, match=r"not a drafter for SGLang; seen: dflash"):
        _ = spec(drafter="dflash").arm_names


def test_the_launch_covers_every_arm_and_own_arguments_win() -> None:
    served = spec(
        drafter=str(DEMO / "drafter_trained"),
        arms=("eagle:5_1_6", "eagle:3_4_16"),
        arguments={"port": 7},
    )
    values = host.arguments(served, worker_index=1, cuda=False)
    shape = [
        values[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens")
    ]
    assert shape == [5, 4, 16]
    assert (values["speculative_algorithm"], values["port"], values["device"]) == (
        "EAGLE",
        7,
        "cpu",
    )
    assert "speculative_algorithm" not in host.arguments(
        spec(drafter="off"), worker_index=0, cuda=False
    )


def test_there_is_room_for_the_drafts_of_two_rounds_behind_the_longest_request() -> None:
    served = spec(drafter="eagle", arms=("off", "eagle:5_4_16"), max_sequence_tokens=256)
    values = host.arguments(served, worker_index=0, cuda=False)
    assert values["context_length"] >= 256 + 2 * 5 * 4


def test_workers_of_one_gateway_take_gpus_side_by_side() -> None:
    served = spec(drafter="ngram", tensor_parallel_size=2, memory_saver=True)
    values = host.arguments(served, worker_index=3, cuda=True)
    assert (values["base_gpu_id"], values["tp_size"], values["mem_fraction_static"]) == (6, 2, 0.4)
    assert values["enable_weights_cpu_backup"]
    assert "attention_backend" not in values


@pytest.mark.parametrize(
    "drafter", ["eagle", str(DEMO / "drafter_trained")], ids=["fresh", "without a bias"]
)
def test_a_drafter_gets_the_bias_that_sglang_would_fill_at_random(
    tmp_path: Path, drafter: str
) -> None:
    complete = host.complete_drafter(spec(drafter=drafter), tmp_path)
    tensors = load_file(Path(complete.drafter_dir) / "model.safetensors")
    assert torch.equal(tensors["fc.bias"], torch.zeros(128))
    assert complete.speculator == "eagle"
    again = host.complete_drafter(complete, tmp_path)
    assert again == complete


def test_an_eagle_with_norms_that_sglang_lacks_is_refused(tmp_path: Path) -> None:
    net = EagleNet.fresh(read_config(DEMO / "policy_start"), EagleOptions(norms=True), 0)
    net.save(tmp_path / "drafter")
    with pytest.raises(ConfigError, match=r"no norms: .*drafter; seen: norms=true"):
        host.complete_drafter(spec(drafter=str(tmp_path / "drafter")), tmp_path)


def test_a_fresh_eagle3_has_rows_and_a_checkpoint_of_the_same_layers(tmp_path: Path) -> None:
    fresh = spec(drafter="eagle3")
    complete = host.complete_drafter(fresh, tmp_path)
    assert (complete.speculator, complete.drafter_dir) == ("eagle3", str(tmp_path))
    assert row_layout(fresh).inner == row_layout(complete).inner == (2, 6, 9)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["t2d"].all()  # every token, unless a checkpoint restricts them
    assert not tensors["d2t"].any()


@pytest.mark.parametrize("installed", [None, "0.5.22"])
def test_a_missing_or_unknown_sglang_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(host, "version", version)
    with pytest.raises(
        ConfigError,
        match="make setup-sglang" if installed is None else r"seen: 0\.5\.22; allowed: 0\.5\.21",
    ):
        host.check_installed()


def test_the_supported_release_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "version", lambda _: RELEASE)
    assert host.check_installed() == RELEASE


def test_sglang_puts_no_numbers_where_logits_are_none_whatever_its_surroundings_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_SANITIZE_NAN_LOGITS", "1")
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given[2]))
    started: list[dict[str, str]] = []
    host.restart(spec())
    assert started[0]["SGLANG_SANITIZE_NAN_LOGITS"] == "0"


def test_what_sglang_rounds_to_is_the_number_format_of_its_tokens() -> None:
    def format_of(**arguments: str) -> str:
        return SGLangSpec(model_dir="m", dtype="bfloat16", arguments=arguments).number_format

    assert format_of() == "bfloat16"
    assert format_of(quantization="w8a8_int8") == "w8a8_int8"
    int8 = spec(dtype="bfloat16", profile="int8_w8a8")
    assert int8.number_format == "int8_w8a8"
    assert format_of(kv_cache_dtype="fp8_e5m2") == "bfloat16+kv_fp8_e5m2"
    assert format_of(kv_cache_dtype="fp8_e4m3", quantization="fp8") == "fp8+kv_fp8_e4m3"
    for same in ("auto", "bf16", "bfloat16"):
        assert format_of(kv_cache_dtype=same) == "bfloat16"


def test_a_profile_is_sglangs_own_method_and_leaves_what_drafts_alone() -> None:
    found = host.arguments(spec(dtype="bfloat16", profile="int8_w8a8"), worker_index=0, cuda=False)
    assert found["quantization"] == "w8a8_int8"
    assert found["speculative_draft_model_quantization"] == "unquant"
    assert "quantization" not in host.arguments(spec(), worker_index=0, cuda=False)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dtype": "float32"}, "seen: float32; allowed: bfloat16"),
        ({"arguments": {"quantization": "fp8"}}, "seen: fp8; allowed: none beside"),
        ({"profile": "fp8_channel"}, "int8_w8a8"),
    ],
)
def test_a_profile_that_sglang_cannot_serve_so_is_refused_by_name(
    settings: dict[str, Any], match: str
) -> None:
    with pytest.raises((ConfigError, ValidationError), match=match):
        spec(**{"dtype": "bfloat16", "profile": "int8_w8a8", **settings})


def test_a_profile_rounds_no_experts() -> None:
    int8 = spec(dtype="bfloat16", profile="int8_w8a8")
    int8.check_model(0)
    spec().check_model(8)
    with pytest.raises(ConfigError, match=r"rounds no experts; seen: 8 experts a layer"):
        int8.check_model(8)


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ({"disaggregation_mode": "prefill"}, "gateway.engine.workers"),
        ({"disaggregation_transfer_backend": "nixl"}, "gateway.engine.workers"),
        ({"encoder_only": True}, "gateway.engine.workers"),
        ({"dp_size": 2}, "gateway.engine.workers"),
        ({"enable_dp_attention": True}, "gateway.engine.workers"),
        ({"pp_size": 2}, "gateway.engine.workers"),
        ({"nnodes": 2}, "one worker per host"),
        ({"dist_init_addr": "10.0.0.1:5000"}, "one worker per host"),
        ({"enable_eplb": True}, "expert_parallel_size"),
        ({"ep_num_redundant_experts": 4}, "expert_parallel_size"),
        ({"tp_size": 2}, "tensor_parallel_size"),
        ({"ep_size": 2}, "expert_parallel_size"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_layout_with_schedulers_that_nobody_tells_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, str | int | bool], instead: str
) -> None:
    ((name, value),) = arguments.items()
    file = tmp_path / "run.toml"
    file.write_text(f"[gateway.engine.sglang.arguments]\n{name} = {toml_value(value)}\n")
    with pytest.raises(ConfigError, match=rf"arguments\.{name} is not served") as refused:
        load_config(GatewayConfig, "gateway", [file])
    assert instead in str(refused.value)


def test_layouts_that_are_off_are_no_layouts() -> None:
    off = {"disaggregation_mode": "null", "dp_size": 1, "enable_dp_attention": False, "nnodes": 1}
    values = host.arguments(spec(drafter="off", arguments=off), worker_index=0, cuda=True)
    assert values | off == values


def test_experts_are_divided_over_the_gpus_of_a_worker() -> None:
    served = spec(drafter="off", tensor_parallel_size=4, expert_parallel_size=2)
    values = host.arguments(served, worker_index=1, cuda=True)
    assert (values["base_gpu_id"], values["tp_size"], values["ep_size"]) == (4, 4, 2)
    with pytest.raises(ConfigError, match=r"does not divide tensor_parallel_size.*divisor of 4"):
        spec(tensor_parallel_size=4, expert_parallel_size=3)
    between = {"arguments": {"moe_a2a_backend": "deepep"}, "tensor_parallel_size": 4}
    assert spec(**between, expert_parallel_size=4).arguments["moe_a2a_backend"] == "deepep"
    with pytest.raises(ConfigError, match=r"over all GPUs of a worker.*seen: 2; allowed: 4"):
        spec(**between, expert_parallel_size=2)
