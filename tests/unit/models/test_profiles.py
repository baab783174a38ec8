"""The table of profiles, and the profile that a setting selects for a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.config.load import load_config
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.profiles import PROFILES, ROUNDED, chosen_profile
from paceline.services.rollout_gateway.config import GatewayConfig

CONFIG = ModelConfig("llama", 320, 128, 352, 12, 4, 2, 32, 1e-6, 512)


def test_a_name_chooses_its_profile_and_nothing_chooses_none() -> None:
    assert chosen_profile("") is None
    for name in ROUNDED:
        assert chosen_profile(name) == PROFILES[name]


def test_the_setting_takes_every_profile_and_refuses_other_names() -> None:
    def read(value: str) -> str:
        words = [f"gateway.engine.embedded.profile={value}"]
        return load_config(GatewayConfig, "gateway", [], words).engine.embedded.profile

    for name in ("", *ROUNDED):
        assert read(f'"{name}"') == name
    with pytest.raises(ConfigError, match=r"int4.*int8, int8_w8a8, fp8_channel, fp8_tensor"):
        read("int4")


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, paceline.models.profiles; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
