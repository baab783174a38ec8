"""The gateway's settings: which exist, and what wrong ones say."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import known_keys
from paceline.errors import ConfigError, InvalidInput
from rollout_gateway.config import GatewayConfig, engine_settings

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
OWN_KEYS = """
drafter engine.command_deadline_s engine.dtype engine.embedded.compile engine.embedded.more_drafters
engine.embedded.prefix_slots
engine.embedded.prefix_tokens engine.embedded.quantize engine.embedded.speculate_rows
engine.embedded.verification engine.embedded.verify_budget
engine.kind engine.max_batch engine.max_sequence_tokens
engine.pin_cores engine.prefill_tokens engine.ready_deadline_s engine.restart_backoff_s engine.script
engine.sglang.arguments engine.sglang.device engine.sglang.drafter_swap engine.sglang.memory_fraction
engine.sglang.memory_saver engine.sglang.tensor_parallel_size engine.threads
engine.workers features.byte_budget features.dtype features.gather_bytes features.layers features.queue_batches
features.rejected
features.ring_rows features.share max_unsent_bytes model speculation.arms
speculation.bandit.epsilon speculation.bandit.groups speculation.bandit.kind speculation.bandit.watchdog_rounds
speculation.bandit.window speculation.forced_arm spool_dir tokenizer trajectories
chat.reasoning chat.tool_format queue.limit queue.per_key queue.running queue.wait_s release_after_s
rewards.deadline_s rewards.marker rewards.model.deadline_s rewards.model.max_batch rewards.model.max_tokens
rewards.model.model rewards.model.threads rewards.processes rewards.remote.attempts rewards.remote.breaker_failures
rewards.remote.breaker_open_s rewards.remote.deadline_s rewards.remote.parallel rewards.remote.token
rewards.remote.url rewards.sandbox.cpu_s rewards.sandbox.file_bytes rewards.sandbox.isolation
rewards.sandbox.memory_bytes rewards.sandbox.output_bytes rewards.sandbox.parallel rewards.sandbox.processes
rewards.sandbox.wall_s sessions.group_deadline_s sessions.implicit sessions.implicit_timeout_s sessions.limit
sessions.max_parallel sessions.max_tokens sessions.max_turns sessions.timeout_s
"""
SHARED = ("run.", "redis.", "telemetry.", "security.", "addresses.")


def test_the_keys_are_these() -> None:
    own = {key for key in known_keys(GatewayConfig) if not key.startswith(SHARED)}
    assert own == set(OWN_KEYS.split())


@pytest.mark.parametrize("model", ["", "/nowhere", str(DEMO.parent)])
def test_a_wrong_model_directory_is_one_clear_line(model: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.model") as raised:
        _ = GatewayConfig(model=model).model_dir
    assert "\n" not in str(raised.value)


def test_a_broken_script_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"arms": 3}')
    config = GatewayConfig.model_validate(
        {"model": str(DEMO), "engine": {"kind": "scripted", "script": str(path)}}
    )
    with pytest.raises(InvalidInput, match=r"script\.json"):
        engine_settings(config)


def test_versions_outlive_the_process_only_in_a_run(tmp_path: Path) -> None:
    assert GatewayConfig().spool is None
    in_run = GatewayConfig.model_validate({"trajectories": True, "run": {"dir": str(tmp_path)}})
    assert in_run.spool == tmp_path / "spool" / "gateway"


def test_layers_to_capture_reach_the_embedded_engine_and_no_other() -> None:
    keys = {"model": str(DEMO), "features": {"layers": [2, 6]}}
    assert engine_settings(GatewayConfig.model_validate(keys))["capture_inner"] == [2, 6]
    for kind in ("scripted", "sglang"):
        with pytest.raises(
            ConfigError, match=rf"features\.layers; seen: {kind}; allowed: embedded"
        ):
            engine_settings(GatewayConfig.model_validate(keys | {"engine": {"kind": kind}}))
