"""Two unchanged loops of the public package `tinker-cookbook`, on local data of a few lines.

PACELINE_TINKER_COOKBOOK names a Python that has the package, because it pins other versions than
constraints.txt does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.tinker.conftest import ONE_WORKER

from benchmarks.tinker_loop import MODEL, TinkerServer, started, stopped
from paceline.local.patience import patient

PYTHON = os.environ.get("PACELINE_TINKER_COOKBOOK", "")
NAME = "Qwen/Qwen3-8B-Base"
"""A name that the loops find a renderer for; here it is the demo's policy."""
CONTEXT = 2048  # the loops' prompts have more letters than the demo's context has tokens
RUN_S = 240
CARD = """---
configs:
- config_name: {name}
  data_files:
  - split: train
    path: train.jsonl
---
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="PACELINE_TINKER_COOKBOOK names no Python"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the model and both data sets under the names that the loops use."""
    root = tmp_path_factory.mktemp("cookbook")
    shutil.copytree(MODEL, root / NAME)
    config = json.loads((root / NAME / "config.json").read_text())
    (root / NAME / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": CONTEXT})
    )
    questions = [{"question": f"{n} + 4?", "answer": f"#### {n + 4}"} for n in range(8)]
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n} is a number."},
            ]
        }
        for n in range(8)
    ]
    sets = {"openai/gsm8k": ("main", questions), "HuggingFaceH4/no_robots": ("default", talks)}
    for name, (config_name, rows) in sets.items():
        (root / name).mkdir(parents=True)
        (root / name / "README.md").write_text(CARD.format(name=config_name))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (root / name / "train.jsonl").write_text(lines)
    return root


@pytest.fixture(scope="module")
def cookbook(folder: Path) -> Iterator[TinkerServer]:
    found = started(
        folder / "run",
        folder / NAME,
        **{
            "tinker.model_names": f'["{NAME}"]',
            "gateway.engine.max_sequence_tokens": CONTEXT,
            **ONE_WORKER,
        },
    )
    try:
        yield found
    finally:
        stopped(found)


@pytest.mark.parametrize("loop", ["sl_loop", "rl_loop"])
def test_the_loops_of_the_cookbook_run_unchanged(
    cookbook: TinkerServer, folder: Path, loop: str
) -> None:
    log = folder / loop
    words = ["batch_size=4", "max_steps=2", "save_every=1", "lora_rank=8"]
    words += ["group_size=4", "max_tokens=12"] if loop == "rl_loop" else []
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{loop}", *words]
    given = [f"base_url={cookbook.url}", f"model_name={NAME}", f"log_path={log}"]
    environment = {
        **os.environ,
        "TINKER_API_KEY": cookbook.key,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        [*command, *given],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(RUN_S),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    checkpoints = [json.loads(line) for line in (log / "checkpoints.jsonl").open()]
    assert [one["name"] for one in checkpoints] == ["000001", "final"]
    if loop == "sl_loop":
        assert rows[1]["train_mean_nll"] < rows[0]["train_mean_nll"]
