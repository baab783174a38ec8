"""The gateway's settings: their names, and the errors of wrong values."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.workers.local import engine_settings

DEMO = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"


@pytest.mark.parametrize("model", ["", "/nowhere", str(DEMO.parent)])
def test_a_wrong_model_directory_is_one_clear_line(model: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.model") as raised:
        _ = GatewayConfig(model=model).model_dir
    assert "\n" not in str(raised.value)


def test_versions_outlive_the_process_only_in_a_run(tmp_path: Path) -> None:
    assert GatewayConfig().spool is None
    in_run = GatewayConfig.model_validate({"trajectories": True, "run": {"dir": str(tmp_path)}})
    assert in_run.spool == tmp_path / "spool" / "gateway"


def test_layers_to_capture_reach_the_embedded_engine_and_no_other() -> None:
    keys = {"model": str(DEMO), "features": {"layers": [2, 6]}}
    assert engine_settings(GatewayConfig.model_validate(keys))["capture_inner"] == [2, 6]
    other = GatewayConfig.model_validate(keys | {"engine": {"kind": "sglang"}})
    with pytest.raises(ConfigError, match=r"features\.layers; seen: sglang; allowed: embedded"):
        engine_settings(other)
