"""`paceline drafter train` as a person runs it: real ranks, real signals, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import save_random
from safetensors.torch import load_file

from paceline.local.patience import patient
from paceline.services.drafter_trainer.config import OfflineConfig
from paceline.services.drafter_trainer.offline.rank import train

SETTINGS: dict[str, Any] = {"batch_tokens": 256, "row_tokens": 128, "lr": 1e-3, "warmup_steps": 0}


@pytest.fixture
def world(tmp_path: Path) -> Path:
    save_random(tmp_path / "model", "llama")
    random = np.random.default_rng(0)
    with (tmp_path / "data.jsonl").open("w") as file:
        for _ in range(16):
            ids = random.integers(3, 97, int(random.integers(12, 40))).tolist()
            file.write(
                json.dumps({"input_ids": ids, "loss_mask": [int(i >= 4) for i in range(len(ids))]})
                + "\n"
            )
    return tmp_path


def start(world: Path, *more: str) -> subprocess.Popen[str]:
    settings = [
        part
        for key, value in SETTINGS.items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    paths = [
        "--data",
        str(world / "data.jsonl"),
        "--model",
        str(world / "model"),
        "--out",
        str(world / "out"),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.cli.main", "drafter", "train", *paths, *settings, *more],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def in_process(world: Path, stopped: bool = False, **settings: Any) -> list[dict[str, Any]]:
    given = SETTINGS | {"data": world / "data.jsonl", "model": world / "model"} | settings
    told: list[dict[str, Any]] = []
    train(OfflineConfig.model_validate(given), told.append, lambda: stopped)
    return told


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_two_ranks_train_a_speculator_as_one_rank_does_and_one_goes_on_from_them(
    world: Path,
) -> None:
    process = start(world, "--ranks", "2", "--steps", "2", "--log-every", "1")
    _, said = process.communicate(timeout=patient(90))
    assert process.returncode == 0, said
    assert "trained: step 2, loss" in said
    assert "heldout: step 2, length" in said
    told = in_process(world, out=world / "one", steps=2)
    ours = [json.loads(line) for line in (world / "out/log.jsonl").open()]
    steps = [message for message in told if message["kind"] == "trained"]
    for two, one in zip(ours[:2], steps, strict=True):
        assert two["trained"]["positions"] == one["positions"]
        assert two["trained"]["loss"] == pytest.approx(one["loss"], rel=1e-5)
    two, one = (
        load_file(world / out / "checkpoint/speculator/model.safetensors") for out in ("out", "one")
    )
    for name, tensor in one.items():
        assert float((two[name] - tensor).norm() / tensor.norm()) < 1e-4, name
    more = in_process(world, out=world / "out", steps=3)
    assert [message["step"] for message in more if message["kind"] in ("resumed", "trained")] == [
        2,
        3,
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_ctrl_c_saves_and_the_run_goes_on_from_there(world: Path) -> None:
    process = start(world, "--steps", "100000", "--log-every", "1")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("trained: step 3,"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=patient(60)) == 130, rest
    assert "the same command resumes" in rest
    saved = load_file(world / "out/checkpoint/speculator/model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    told = in_process(world, True, out=world / "out", steps=100_000)
    assert next(message["step"] for message in told if message["kind"] == "resumed") >= 3


@pytest.mark.slow
def test_a_bad_line_ends_the_command_with_its_name_and_code_2(world: Path) -> None:
    with (world / "data.jsonl").open("a") as file:
        file.write('{"input_ids": [1, 200], "loss_mask": [0, 1]}\n')
    process = start(world)
    _, said = process.communicate(timeout=patient(60))
    assert process.returncode == 2
    assert "paceline drafter train: " in said
    assert (
        "data.jsonl, line 17: tokens outside the model's vocabulary; seen: (1, 200); allowed: 0 "
        "to 96" in said
    )


@pytest.mark.slow
def test_a_wrong_argument_is_named_before_anything_starts(world: Path) -> None:
    process = start(world, "--window", "1")
    _, said = process.communicate(timeout=patient(60))
    assert process.returncode == 2
    assert "--window: Input should be greater than or equal to 8; seen: 1" in said
    assert not (world / "out").exists()
