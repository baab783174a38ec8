"""The table of profiles, and which of them a setting chooses for a model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.profiles import PROFILES, ROUNDED, chosen_profile, model_words
from paceline.services.rollout_gateway.config import GatewayConfig

CONFIG = ModelConfig("llama", 320, 128, 352, 12, 4, 2, 32, 1e-6, 512)


def written(path: Path, **content: Any) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def start() -> str:
    return "0123456789abcdef"


def never() -> str:
    raise AssertionError("weights are hashed for files alone")


def test_a_name_chooses_its_profile_and_nothing_chooses_none() -> None:
    assert chosen_profile("", CONFIG, never) is None
    for name in ROUNDED:
        assert chosen_profile(name, CONFIG, never) == PROFILES[name]


def test_profiles_that_round_have_scales_and_eight_bits_and_the_others_neither() -> None:
    for name, profile in PROFILES.items():
        assert (name in ROUNDED) == bool(profile.scale_per) == ("8" in profile.weight_dtype)
        assert profile.cpu
        assert profile.cuda


def test_a_file_of_this_model_chooses_the_profile_that_it_names(tmp_path: Path) -> None:
    content = {"profile": "fp8_tensor", "model": model_words(CONFIG), "weights": start()}
    file = written(tmp_path / "p.json", **content, more=1)
    assert chosen_profile(file, CONFIG, start) == PROFILES["fp8_tensor"]


@pytest.mark.parametrize("changed", ["num_layers", "hidden_size", "vocab_size", "num_kv_heads"])
def test_a_profile_of_another_model_is_refused_with_both_shapes(
    changed: str, tmp_path: Path
) -> None:
    other = replace(CONFIG, **{changed: 1 if changed == "num_kv_heads" else 96})
    file = written(tmp_path / "p.json", profile="int8", model=model_words(other))
    with pytest.raises(ConfigError, match="a profile of another model") as caught:
        chosen_profile(file, CONFIG, start)
    assert caught.value.seen == model_words(other)
    assert caught.value.allowed == model_words(CONFIG)


@pytest.mark.parametrize("measured", [{"weights": "fedcba9876543210"}, {}])
def test_a_profile_of_other_weights_of_that_shape_is_refused_with_both_hashes(
    measured: dict[str, str], tmp_path: Path
) -> None:
    file = written(tmp_path / "p.json", profile="int8", model=model_words(CONFIG), **measured)
    with pytest.raises(ConfigError, match="measured on other weights") as caught:
        chosen_profile(file, CONFIG, start)
    assert caught.value.seen == measured.get("weights", "none")
    assert caught.value.allowed == f"{start()}, or a name"


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    for content, said in (("[1, 2]", "seen: None"), ('{"profile": "int4"}', "seen: 'int4'")):
        (tmp_path / "p.json").write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"names no profile.*{said}"):
            chosen_profile(str(tmp_path / "p.json"), CONFIG, start)
    (tmp_path / "p.json").write_text("{", encoding="utf-8")
    for name in ("p.json", "none.json"):
        with pytest.raises(ConfigError, match=rf"no profile in .*{name}"):
            chosen_profile(str(tmp_path / name), CONFIG, start)


def test_the_setting_takes_every_profile_and_files_and_refuses_other_names() -> None:
    def read(value: str) -> str:
        words = [f"gateway.engine.embedded.profile={value}"]
        return load_config(GatewayConfig, "gateway", [], words).engine.embedded.profile

    for name in ("", *ROUNDED, "runs/int8.json"):
        assert read(f'"{name}"') == name
    with pytest.raises(ConfigError, match=r"int4.*int8, int8_w8a8, fp8_channel, fp8_tensor"):
        read("int4")


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, paceline.models.profiles; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
