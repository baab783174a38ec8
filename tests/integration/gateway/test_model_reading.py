"""The gateway lists the end tokens of its model at the start, and refuses a model that it would
misread.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.demo_runs import demo_folder
from paceline.errors import ConfigError
from paceline.local.checks import check_reading, reading_findings
from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.server import running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(demo_folder() / "policy_start", folder)
    return folder


def changed(model: Path, name: str, **values: object) -> None:
    path = model / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}), encoding="utf-8")


def test_serve_refuses_a_tokenizer_larger_than_the_model_by_name_and_numbers(model: Path) -> None:
    changed(model, "config.json", vocab_size=319)
    command = [sys.executable, "-m", "paceline.services.rollout_gateway", f"gateway.model={model}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    said = done.stdout + done.stderr
    assert done.returncode
    assert "has more tokens than the model has rows" in said
    assert "320 tokens; beyond the model: 319 '<0xFF>'" in said


@pytest.mark.slow
async def test_serve_lists_the_end_tokens_and_their_files(
    model: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(model, "generation_config.json", eos_token_id=[1, 2])
    config = GatewayConfig.model_validate(
        {
            "model": str(model),
            "engine": {"kind": "embedded", "workers": 1},
            "addresses": {"gateway": "127.0.0.1:0", "http": "127.0.0.1:0"},
        }
    )
    async with running(config):
        out = capsys.readouterr()
    said = out.out + out.err + caplog.text
    assert "1 <eos> (config.json, generation_config.json, tokenizer)" in said
    assert "2 <pad> (generation_config.json)" in said


@pytest.mark.slow
def test_a_directory_that_transformers_reads_alike_passes_the_check(model: Path) -> None:
    assert not [one for one in reading_findings(model) if one.verdict == "fail"]


def test_a_chat_that_would_be_misread_is_refused_by_text(model: Path) -> None:
    changed(model, "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    with pytest.raises(ConfigError, match=r"would be misread: .* differs from transformers"):
        check_reading(model)
