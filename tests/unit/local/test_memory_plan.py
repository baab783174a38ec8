"""A run's memory, slots and ranks are planned before anything starts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import save_random
from torch import Tensor
from transformers import Qwen2Config

from paceline import processor
from paceline.cli import plan
from paceline.cli.plan import plan_run
from paceline.errors import ConfigError
from paceline.local import memory_plan
from paceline.local.memory_plan import ServicePlan
from paceline.models.config import ModelConfig, read_config
from paceline.models.in_place import ServedModel, storages
from paceline.models.profiles import PROFILES, ROUNDED
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.model import StartWeights, policy_on_meta
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore

DEMO = Path(__file__).parents[3] / "examples/demo"
SGLANG = Path(__file__).parents[3] / "examples/sglang/qwen2.5-7b-8gpus.toml"
OF_SGLANG = ["policy_trainer.ranks=8", "drafter_trainer.gate.drafts=likeliest"]
"""Settings that its run derives on eight GPUs."""
GIB = 2**30
QWEN_7B = ModelConfig(
    family="qwen2",
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
)


def test_parameters_follow_from_the_shape() -> None:
    assert memory_plan.parameters(QWEN_7B) == pytest.approx(7.62e9, rel=0.001)


def sglang(workers: int, **settings: Any) -> GatewayConfig:
    engine = {"kind": "sglang", "workers": workers, "dtype": "bfloat16", "sglang": settings}
    return GatewayConfig.model_validate({"engine": engine})


def check(gib: int, *, ranks: int, saver: bool) -> str:
    """Return the plan of an engine, a policy and a drafter on the same GPUs."""
    settings = {"tensor_parallel_size": 2, "memory_fraction": 32 / gib, "memory_saver": saver}
    engine = memory_plan.sglang_plan(QWEN_7B, sglang(4, **settings), gib * GIB)
    drafter = memory_plan.drafter_plan(QWEN_7B, ranks=8, tokens=1024)
    policy = policy_plan(ranks=ranks, reshard_after_forward=True)
    return memory_plan.check_gpus([[engine, policy, drafter]], gib * GIB)


def policy_plan(*, ranks: int = 8, tokens: int = 512, **settings: Any) -> ServicePlan:
    defaults = {"reshard_after_forward": False, "recompute_activations": False, "head_rows": 1024}
    config = PolicyTrainerConfig.model_validate({**defaults, **settings})
    return memory_plan.policy_plan(QWEN_7B, config, ranks, tokens)


PPO = {"algorithm": {"name": "ppo"}}
REFERENCE = {"algorithm": {"kl": {"coefficient": 0.1}}}


def test_a_plan_counts_every_byte_of_a_rank() -> None:
    share = 4 * memory_plan.parameters(QWEN_7B) // 8
    assert policy_plan(tokens=100).parts == {
        "weights": share,
        "gradients": share,
        "optimizer": 2 * share,
        "gathered": 2 * 8 * share,  # weights and gradients, whole
        "activations": 4 * 100 * 28 * memory_plan.layer_activations(QWEN_7B),
        "logits": 4 * 4 * 100 * 152_064,
    }
    assert policy_plan(ranks=1).parts["gathered"] == 8 * share  # weights; gradients are whole
    layer = memory_plan.layer_parameters(QWEN_7B)
    units = 2 * (2 * 152_064 * 3584) + 3 * layer
    assert policy_plan(reshard_after_forward=True).parts["gathered"] == 4 * units
    inputs = 28 * 3584 + memory_plan.layer_activations(QWEN_7B)
    recomputed = policy_plan(tokens=100, recompute_activations=True)
    assert recomputed.parts["activations"] == 4 * 100 * inputs
    assert policy_plan(tokens=5000).parts["logits"] == 4 * 4 * 1024 * 152_064
    half = policy_plan(tokens=100, ranks=1, compute_dtype="bfloat16")
    assert half.parts["gathered"] == (2 + 4) * 8 * share // 4
    assert half.parts["activations"] == policy_plan(tokens=100).parts["activations"] // 2


def test_critic_reference_adapters_and_small_moments_are_counted() -> None:
    share = 4 * memory_plan.parameters(QWEN_7B) // 8
    headless = share - 4 * 152_064 * 3584 // 8
    resharded = {"reshard_after_forward": True}
    assert policy_plan(**REFERENCE, **resharded).parts["reference"] == share
    critic = policy_plan(**PPO, **resharded).parts["critic"]
    assert critic == pytest.approx(4 * headless, abs=64)
    adapters = {"rank": 4, "targets": ["q_proj"]}
    few = policy_plan(adapters=adapters, **REFERENCE, **resharded).parts
    numbers = memory_plan.adapter_parameters(QWEN_7B, 4, ["q_proj"])
    trained = 4 * numbers // 8
    assert (few["weights"], few["gradients"]) == (share + trained, trained)
    assert few["optimizer"] == 2 * trained
    layer = memory_plan.layer_parameters(QWEN_7B)
    assert few["gathered"] == 4 * (2 * (152_064 * 3584) + 2 * layer + 2 * numbers)
    assert "reference" not in few
    small = policy_plan(optimizer={"moments": "int8"}, **PPO, **resharded)
    assert small.parts["optimizer"] == pytest.approx(2 * share * (1 + 4 / 256) / 4, abs=64)
    assert small.parts["critic"] == pytest.approx(headless * (2 + (1 + 4 / 256) / 2), abs=64)
    kept = small.parts["weights"] + small.parts["optimizer"]
    assert small.stays == pytest.approx(kept + headless * (1 + (1 + 4 / 256) / 2), abs=64)
    assert policy_plan(offload=True, **PPO).stays == 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_autograd_keeps_of_a_layer(
    tmp_path: Path, family: str, *, recompute: bool
) -> None:
    """Measure 200 tokens in three layers minus two, which cancels embedding and final norm."""
    kept = []
    for layers in (2, 3):
        save_random(tmp_path / str(layers), family, hidden_size=64, num_hidden_layers=layers)
        kept.append(kept_bytes(tmp_path / str(layers), recompute=recompute))
    model = read_config(tmp_path / "3")
    numbers = model.hidden_size if recompute else memory_plan.layer_activations(model)
    assert kept[1] - kept[0] == pytest.approx(4 * 200 * numbers, rel=0.02)


def kept_bytes(directory: Path, *, recompute: bool) -> int:
    """Storages that the backward of a forward of 200 tokens reads, without the weights'."""
    policy = policy_on_meta(directory, recompute=recompute)
    StartWeights(directory).fill(policy, policy.names(), "cpu")
    weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    positions = torch.arange(200)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.lm.model(input_ids=positions % 64, position_ids=positions, use_cache=False)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


def test_what_shares_a_gpu_fits_when_the_engine_gives_its_memory_back() -> None:
    assert check(80, ranks=8, saver=True).endswith(" of 81,920 MiB, for gateway")
    with pytest.raises(ConfigError, match="too small for the turn of policy_trainer"):
        check(64, ranks=8, saver=False)
    check(64, ranks=8, saver=True)


def test_a_plan_that_cannot_fit_a_gpu_is_refused_with_whose_turn_and_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"too small for the turn of gateway: .*seen: [\d,]+ MiB"):
        check(64, ranks=2, saver=True)
    with pytest.raises(ConfigError, match=r"allowed: 40,960 MiB, with another model"):
        check(40, ranks=8, saver=False)


def test_weights_that_leave_no_room_for_keys_and_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_fraction leaves no room"):
        memory_plan.sglang_plan(QWEN_7B, sglang(1, memory_fraction=0.5), 16 * GIB)


def planned(*overrides: str) -> plan.Checked:
    model = f"gateway.model={DEMO / 'policy_start'}"
    return plan_run([DEMO / "demo.toml"], [model, "gateway.engine.workers=2", *overrides])


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("policy_trainer.device=cuda", "policy_trainer.device=cuda"),
        ("drafter_trainer.device=cuda", "drafter_trainer.device=cuda"),
    ],
)
def test_a_gpu_that_is_not_there_is_told_before_anything_starts(
    setting: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    monkeypatch.setattr(plan, "_GPU_FILES", ())
    with pytest.raises(ConfigError, match="has no GPU") as told:
        planned(setting)
    assert named in str(told.value)


def test_a_gpu_without_its_tool_on_the_path_is_left_to_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    monkeypatch.setattr(plan, "_GPU_FILES", (str(tmp_path),))
    assert planned("policy_trainer.device=cuda").lines


def test_two_never_compute_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", lambda: [80 * GIB])
    assert planned().overrides == ["policy_trainer.ranks=1"]
    planned("policy_trainer.ranks=2")  # which then compute on the CPU
    with pytest.raises(ConfigError, match=r"policy_trainer.ranks; seen: 2; allowed: at most 1"):
        planned("policy_trainer.ranks=2", "policy_trainer.device=cuda")
    with pytest.raises(ConfigError, match=r"slots of the drafter; seen: 2; allowed: at most 1"):
        planned("drafter_trainer.device=cuda")


@pytest.mark.parametrize(
    ("visible", "gib"),
    [(None, [80, 40]), ("", []), ("1", [40]), ("GPU-a,1", [80, 40]), ("7", [])],
)
def test_the_gpus_of_a_machine_are_those_that_may_be_seen(
    visible: str | None, gib: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        f'case "$3" in "") echo {80 << 10}; echo {40 << 10} ;; --id=1) echo {40 << 10} ;;\n'
        f"--id=GPU-a,1) echo {80 << 10}; echo {40 << 10} ;; *) exit 6 ;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert plan.gpu_bytes() == [size * GIB for size in gib]


def large_model(directory: Path) -> str:
    """The setting of a model directory with the shape of SmolLM2-135M, without weights."""
    shape = {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "head_dim": 64}
    shape |= {"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    shape |= {"num_key_value_heads": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
    shape |= {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e5}
    config = {**shape, "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    return f"gateway.model={directory}"


def test_a_large_model_has_one_worker_with_all_cores_unless_settings_have_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "usable_cores", lambda: 3)
    monkeypatch.setattr(processor, "memory_bytes", lambda: 24 * GIB)
    words = [large_model(tmp_path), "coordinator.tasks_path=t.jsonl"]
    found = plan_run([], words)
    assert found.overrides[:5] == [
        "policy_trainer.tokens_per_micro_batch=1024",
        "gateway.engine.workers=1",
        "gateway.engine.threads=0",
        "policy_trainer.threads_per_rank=3",
        "drafter_trainer.threads_per_rank=3",
    ]
    disk, memory = found.lines
    assert memory.startswith("memory: ")
    assert "gateway 1 x " in memory
    assert "policy_trainer 1 x " in memory
    assert re.fullmatch(r"disk( may run short)?: at most 8,7\d\d MiB of [\d,]+ MiB free", disk)

    own = [*words, "gateway.engine.workers=2", "policy_trainer.tokens_per_micro_batch=512"]
    assert plan_run([], own).overrides[:1] == ["policy_trainer.ranks=2"]
    small = [f"gateway.model={DEMO / 'policy_start'}", "coordinator.tasks_path=t.jsonl"]
    assert not any("threads" in one for one in plan_run([], small).overrides)


def test_the_gateway_of_a_run_writes_trajectories_without_being_told(tmp_path: Path) -> None:
    text = (DEMO / "demo.toml").read_text().replace("trajectories = true\n", "")
    (tmp_path / "run.toml").write_text(text)
    words = [f"gateway.model={DEMO / 'policy_start'}", "gateway.engine.workers=2"]
    assert "gateway.trajectories=true" in plan_run([tmp_path / "run.toml"], words).overrides
    assert "gateway.trajectories=true" not in planned().overrides
    with pytest.raises(ConfigError, match="needs the trajectories of its gateway"):
        planned("gateway.trajectories=false")


def test_the_trainer_takes_what_the_coordinator_lets_grow_old_on_the_slots_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    apart = ("placement=disaggregated", "learner_slots=1", "schedule=fully_async")
    chosen = planned(*(f"coordinator.{one}" for one in (*apart, "max_policy_lag=3"))).overrides
    assert chosen == ["policy_trainer.ranks=1", "policy_trainer.max_staleness=3"]
    asynchronous = "coordinator.schedule=one_step_off"
    assert planned(asynchronous, "policy_trainer.max_staleness=2").overrides == [
        "policy_trainer.ranks=2"
    ]
    with pytest.raises(ConfigError, match="drops groups that the coordinator lets grow older"):
        planned(asynchronous, "policy_trainer.max_staleness=0")


def test_the_nodes_of_a_policy_have_equal_shares_of_its_slots_and_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    apart = ("coordinator.placement=disaggregated", "coordinator.learner_slots=4")
    assert planned(*apart, "run.policy_nodes=4").overrides[0] == "policy_trainer.ranks=4"
    for wrong in ((*apart, "run.policy_nodes=3"), ("run.policy_nodes=2",)):
        with pytest.raises(ConfigError, match="an equal share of the policy's slots and ranks"):
            planned(*wrong)
    with pytest.raises(ConfigError, match=r"policy_trainer.ranks=3"):
        planned(*apart, "run.policy_nodes=2", "policy_trainer.ranks=3")


COARSE = (
    ("gateway.engine.dtype=bfloat16",),
    ("policy_trainer.publish_dtype=bfloat16",),
    *((f"gateway.engine.embedded.profile={name}",) for name in ROUNDED),
    *(
        (f"gateway.engine.sglang.arguments.{argument}", "gateway.engine.kind=sglang")
        for argument in ("quantization=fp8", "kv_cache_dtype=fp8_e5m2", "kv_cache_dtype=bf16")
    ),
    (
        "gateway.engine.sglang.profile=int8_w8a8",
        "gateway.engine.kind=sglang",
        "gateway.engine.dtype=bfloat16",
    ),
    ("gateway.engine.embedded.profile=int8", "policy_trainer.compute_dtype=bfloat16"),
)


@pytest.mark.parametrize("settings", COARSE)
def test_coarser_numbers_of_the_engine_need_a_correction(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    named = re.escape(settings[0])
    with pytest.raises(ConfigError, match=rf"coarser numbers.*seen: {named}.*required=false"):
        planned(*settings)
    correction = "policy_trainer.algorithm.correction"
    with pytest.raises(ConfigError, match="coarser numbers"):
        planned(*settings, f"{correction}.veto=0.01")
    for chosen in ("weight=token", "weight=sequence", "keep=band", "bypass=true", "required=false"):
        planned(*settings, f"{correction}.{chosen}")
    planned(*settings, "policy_trainer.algorithm.name=decoupled")


def test_sets_of_an_engine_that_cannot_leave_its_profile_keep_it() -> None:
    sglang = ("gateway.engine.kind=sglang", "gateway.engine.sglang.profile=int8_w8a8")
    bf16 = ("gateway.engine.dtype=bfloat16", "policy_trainer.algorithm.name=decoupled")
    stays = "coordinator.profile_stays=true"
    assert stays in planned(*sglang, *bf16).overrides
    assert stays not in planned("gateway.engine.embedded.profile=int8", *bf16).overrides
    with pytest.raises(ConfigError, match=r"not served in .*dtype; seen: float32; .*bfloat16"):
        planned(*sglang, "policy_trainer.algorithm.name=decoupled")


def test_numbers_that_are_those_of_the_trainer_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    planned("gateway.engine.dtype=bfloat16", "policy_trainer.compute_dtype=bfloat16")


def test_the_memory_of_the_demo_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    checked = planned()
    disk, line = checked.lines
    assert re.fullmatch(r"disk: at most [\d,]+ MiB of [\d,]+ MiB free", disk)
    services = r"\(gateway 2 x .*, policy_trainer 2 x .*, drafter_trainer 1 x .*, others 1 x .*\)"
    assert re.fullmatch(rf"memory: [\d,]+ MiB of [\d,]+ MiB {services}", line)
    assert checked.overrides == ["policy_trainer.ranks=2"]
    assert planned("gateway.engine.workers=1").overrides == ["policy_trainer.ranks=1"]
    assert planned("policy_trainer.ranks=1").overrides == []  # the file may change it next time


def test_memory_that_a_cpu_lacks_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    lines = planned("gateway.engine.max_batch=100000000").lines
    assert lines[-1].startswith("memory may run short: ")


def test_slots_that_contradict_each_other_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"seen: 3 ranks; allowed: 0 to 2"):
        planned("policy_trainer.ranks=3")
    with pytest.raises(ConfigError, match=r"slots_per_worker .* seen: 2; allowed: 1 "):
        planned("gateway.engine.kind=sglang", "coordinator.slots_per_worker=2")


def test_the_run_on_eight_gpus_trains_its_policy_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", lambda: [80 * GIB] * 8)
    assert plan_run([SGLANG], []).overrides == OF_SGLANG


def test_slots_of_a_cluster_have_a_gpu_each_where_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    monkeypatch.setattr(plan, "_GPU_FILES", ())  # this machine has none
    assert plan_run([SGLANG], [], elsewhere=True).overrides == OF_SGLANG


def test_the_run_on_eight_gpus_leaves_two_fifths_of_them_free_as_it_is_set(
    tmp_path: Path,
) -> None:
    save_qwen(tmp_path)
    model = f"gateway.model={tmp_path}"

    def planned(gib: int, *overrides: str) -> list[str]:
        return plan_run([SGLANG], [model, *overrides], [gib * GIB] * 8).lines

    assert re.fullmatch(
        r"memory of a GPU: at most [\d,]+ MiB of 81,920 MiB, for gateway", planned(80)[-1]
    )
    planned(48)
    for gib, setting in ((80, "recompute_activations=false"), (64, "reshard_after_forward=false")):
        with pytest.raises(ConfigError, match="too small for the turn of policy_trainer"):
            planned(gib, f"policy_trainer.{setting}")


def test_half_of_the_eight_gpus_carry_the_policy_where_it_has_its_own(tmp_path: Path) -> None:
    save_qwen(tmp_path)
    files = [SGLANG, SGLANG.parents[1] / "asynchronous/8gpus_apart.toml"]
    found = plan_run(files, [f"gateway.model={tmp_path}"], [80 * GIB] * 8)
    assert found.overrides == [
        "policy_trainer.ranks=4",
        "drafter_trainer.gate.drafts=likeliest",
        "policy_trainer.max_staleness=2",
    ]
    rows = PolicyTrainerConfig().rows_of_logits(152_064)
    alone = policy_plan(
        ranks=4,
        tokens=10_240,
        reshard_after_forward=True,
        recompute_activations=True,
        compute_dtype="bfloat16",
        head_rows=rows,
    )
    whole = memory_plan.format_size(alone.total + memory_plan.LIBRARIES)
    with pytest.raises(ConfigError, match=rf"turn of policy_trainer.*seen: {whole}"):
        plan_run(files, [f"gateway.model={tmp_path}"], [40 * GIB] * 8)


def save_qwen(directory: Path) -> None:
    """config.json of Qwen2.5-7B's shape."""
    shape = {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "max_position_embeddings": 131_072,
    }
    Qwen2Config(**shape, architectures=["Qwen2ForCausalLM"]).save_pretrained(directory)


def test_the_slowest_services_own_deadline_is_waited_for() -> None:
    assert planned("gateway.engine.ready_deadline_s=600").start_s == 600
    assert planned("policy_trainer.start_deadline_s=700").start_s == 700


def test_the_plan_of_an_embedded_worker_is_what_its_slots_hold(tmp_path: Path) -> None:
    """The store allocates once: 3 running and 2 kept sequences of 20 tokens with 3 states each."""
    save_random(tmp_path, "llama")
    config = read_config(tmp_path)
    model = ServedModel(config, torch.float32, 20)
    store = SlotStore(model.load(tmp_path), 5, 20, keep_hidden=True, inner=(0, 1))
    parts = memory_plan.embedded_parts(config, 5 * 20, 4, states=3, drafter=True)
    slots = {
        "keys and values": store.kv.data.nbytes,
        "hidden states": store.hidden.nbytes,
        "token ids": store.token_ids.nbytes,
    }
    assert {name: parts[name] for name in slots} == slots


@pytest.mark.parametrize("profile", ROUNDED)
def test_the_plan_of_a_profile_is_what_its_engine_keeps_but_for_norms_and_scales(
    profile: str, tmp_path: Path
) -> None:
    if profile.startswith("int8"):
        pytest.importorskip("torchao")
    save_random(tmp_path, "llama")
    config = read_config(tmp_path)
    model = ServedModel(config, torch.float32, 8, PROFILES.get(profile))
    kept = {name: one.nbytes for name, one in storages(model.load(tmp_path)).items()}
    small = sum(size for name, size in kept.items() if "norm" in name or "scales" in name)
    parts = memory_plan.embedded_parts(config, 1, 4, states=0, drafter=False, matrix_item=1)
    assert parts["weights"] == sum(kept.values()) - small


def test_a_plan_counts_experts_and_divides_them_over_a_workers_gpus(tmp_path: Path) -> None:
    model = save_random(tmp_path, "qwen3_moe")
    config = read_config(tmp_path, experts=True)
    matrices = sum(one.numel() for one in model.parameters() if one.dim() > 1)
    assert memory_plan.parameters(config) == matrices
    weights = model.named_parameters()
    gates = sum(one.numel() for name, one in weights if name.endswith("mlp.gate.weight"))
    plan = memory_plan.sglang_plan(config, sglang(3, tensor_parallel_size=4), 2 * GIB)
    # each device holds the whole router of the experts
    assert (plan.devices, plan.parts["weights"]) == (12, 2 * ((matrices - gates) // 4 + gates))


@pytest.mark.parametrize(
    ("tensor", "expert", "named"),
    [(16, 16, "8 experts of 32 on 16 x 1"), (64, 1, "8 experts of 32 on 1 x 64")],
)
def test_experts_that_cannot_be_divided_so_are_refused(
    tmp_path: Path, tensor: int, expert: int, named: str
) -> None:
    save_random(tmp_path, "qwen3_moe")
    config = read_config(tmp_path, experts=True)
    memory_plan.check_experts(config, 16, 8)
    with pytest.raises(ConfigError, match=f"leaves a part of an expert over; seen: {named}"):
        memory_plan.check_experts(config, tensor, expert)
    with pytest.raises(ConfigError, match=r"this model has none; seen: 2 with qwen2"):
        memory_plan.check_experts(QWEN_7B, 2, 2)


def test_a_model_with_experts_has_a_plan_of_its_gateway_alone(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3_moe")
    overrides = [
        f"gateway.model={tmp_path}",
        "gateway.engine.sglang.expert_parallel_size=2",
        "gateway.engine.max_sequence_tokens=256",
    ]
    found = plan_run([SGLANG], overrides, [80 * GIB] * 8)
    assert found.lines[-1].startswith("memory: gateway 8 x 32,768 MiB; ")
    assert "not trained" in found.lines[-1]
    with pytest.raises(ConfigError, match="expert_parallel_size does not divide"):
        plan_run([SGLANG], [*overrides, "gateway.engine.sglang.expert_parallel_size=4"])


def test_workers_and_a_learner_apart_need_a_gpu_each(tmp_path: Path) -> None:
    save_qwen(tmp_path)
    files = [SGLANG, SGLANG.parents[1] / "asynchronous/8gpus_apart.toml"]
    overrides = [f"gateway.model={tmp_path}", "gateway.engine.workers=4"]
    with pytest.raises(ConfigError, match=r"workers and learner; seen: 12; allowed: at most 8"):
        plan_run(files, overrides, [80 * GIB] * 8)


@pytest.mark.parametrize(
    ("arms", "counted"), [(["off", "ngram:4_1_5"], False), (["off", "self:2_1_3"], True)]
)
def test_the_rounded_copy_of_a_policy_that_drafts_for_itself_is_counted(
    arms: list[str], counted: bool
) -> None:
    gateway = GatewayConfig.model_validate({"speculation": {"arms": arms}})
    plan = memory_plan.engine_plan(QWEN_7B, gateway, 0)
    item = plan.parts["weights"] // memory_plan.parameters(QWEN_7B)
    assert plan.parts.get("rounded weights", 0) == counted * plan.parts["weights"] // item * 5 // 8


def test_sglang_gets_a_gate_of_its_own_drafts_and_no_drafter_that_it_cannot_serve() -> None:
    sglang, norms = "gateway.engine.kind=sglang", "drafter_trainer.options.norms=true"
    likeliest = "drafter_trainer.gate.drafts=likeliest"
    assert likeliest in planned(sglang).overrides
    assert likeliest not in planned(norms).overrides
    with pytest.raises(ConfigError, match="SGLang's EAGLE drafter has no norms"):
        planned(sglang, norms)
