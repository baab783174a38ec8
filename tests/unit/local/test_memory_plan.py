"""A run's memory, slots and ranks are known before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import plan
from paceline.cli.plan import plan_run
from paceline.errors import ConfigError
from paceline.local import memory_plan
from paceline.local.memory_plan import RunPlan
from paceline.models.config import ModelConfig

DEMO = Path(__file__).parents[3] / "examples/demo"
SGLANG = Path(__file__).parents[3] / "examples/sglang/qwen2.5-7b-8gpus.toml"
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


def run_plan(*, ranks: int, saver: bool) -> RunPlan:
    engine = memory_plan.sglang_plan(
        QWEN_7B, workers=4, tensor_parallel=2, item=2, pool=32 * GIB, saver=saver
    )
    policy = memory_plan.policy_plan(QWEN_7B, ranks=ranks, reshard=False)
    return RunPlan(engine, policy, memory_plan.drafter_plan(QWEN_7B, ranks=8))


def test_a_plan_counts_every_byte_of_a_rank() -> None:
    policy = memory_plan.policy_plan(QWEN_7B, ranks=8, reshard=False)
    share = 4 * memory_plan.parameters(QWEN_7B) // 8
    assert policy.parts == {
        "weights": share,
        "gradients": share,
        "optimizer": 2 * share,
        "gathered": 8 * share,
    }
    assert memory_plan.policy_plan(QWEN_7B, ranks=1, reshard=False).parts["gathered"] == 0
    resharded = memory_plan.policy_plan(QWEN_7B, ranks=8, reshard=True)
    assert resharded.parts["gathered"] == 4 * memory_plan.layer_parameters(QWEN_7B)
    keys = memory_plan.embedded_plan(QWEN_7B, workers=1, slots=3, tokens=10, item=2, saver=False)
    assert keys.parts["keys and values"] == 2 * 3 * 10 * 28 * 2 * 4 * 128


def test_what_shares_a_gpu_fits_when_the_engine_gives_its_memory_back() -> None:
    run_plan(ranks=8, saver=True).check(80 * GIB)
    peaks = run_plan(ranks=8, saver=True).peaks
    kept = run_plan(ranks=8, saver=False).peaks
    assert kept["policy_trainer"] - peaks["policy_trainer"] == 32 * GIB
    assert kept["gateway"] == peaks["gateway"]


def test_a_plan_that_cannot_fit_a_gpu_is_refused_with_whose_turn_and_both_sizes() -> None:
    with pytest.raises(
        ConfigError, match=r"too small for the turn of policy_trainer: .*seen: [\d,]+ MiB"
    ):
        run_plan(ranks=2, saver=True).check(80 * GIB)
    with pytest.raises(ConfigError, match=r"allowed: 40,960 MiB, with another model"):
        run_plan(ranks=8, saver=False).check(40 * GIB)


def test_weights_that_leave_no_room_for_keys_and_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_fraction leaves no room"):
        memory_plan.sglang_plan(
            QWEN_7B, workers=1, tensor_parallel=1, item=2, pool=8 * GIB, saver=True
        )


@pytest.mark.parametrize(
    ("wanted", "slots", "cores", "on_gpus", "ranks"),
    [(0, 8, 96, True, 8), (4, 8, 96, True, 4), (0, 16, 16, False, 2), (0, 1, 2, False, 1)],
)
def test_the_policy_has_a_rank_a_slot(
    wanted: int, slots: int, cores: int, ranks: int, *, on_gpus: bool
) -> None:
    assert memory_plan.policy_ranks(wanted, slots, cores=cores, on_gpus=on_gpus) == ranks


def planned(*overrides: str) -> plan.Checked:
    model = f"gateway.model={DEMO / 'policy_start'}"
    return plan_run([DEMO / "demo.toml"], [model, "gateway.engine.workers=2", *overrides])


def test_the_demo_has_a_line_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "gpu_bytes", list)
    checked = planned()
    assert [line.split(":")[0] for line in checked.lines[:3]] == [
        "gateway",
        "policy_trainer",
        "drafter_trainer",
    ]
    assert checked.overrides == ["policy_trainer.ranks=2"]
    assert planned("gateway.engine.workers=1").overrides == ["policy_trainer.ranks=1"]
    assert planned("policy_trainer.ranks=1").overrides == []  # the file may say another next time


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
    assert plan_run([SGLANG], []).overrides == ["policy_trainer.ranks=8"]
